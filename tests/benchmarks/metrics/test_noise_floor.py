"""Floors: halves of one set, and the interval of a mean."""

import math

import numpy as np
import pytest
import torch

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.metrics.noise_floor import Figure, half_split, half_width


def test_halves_are_disjoint_and_of_equal_size():
    seen = []

    def distance(a, b):
        seen.append((set(a.tolist()), set(b.tolist())))
        return -2.0

    assert half_split(distance, torch.arange(11), splits=4) == 2.0  # the size of a distance that may be negative
    assert len(seen) == 4 and all(len(a) == len(b) == 5 and not a & b for a, b in seen)
    assert seen[0] != seen[1]


def test_half_split_is_drawn_by_seed_and_shrinks_with_n():
    def distance(a, b):
        return float(a.mean() - b.mean())

    few, many = (torch.randn(n, generator=torch.Generator().manual_seed(0)) for n in (20, 2000))
    assert half_split(distance, few) == half_split(distance, few)
    assert half_split(distance, many, splits=20) < half_split(distance, few, splits=20)


def test_half_width_is_the_normal_one():
    values = (np.arange(400) % 4 == 0).astype(float)  # accuracy 0.25
    assert half_width(values) == pytest.approx(1.96 * math.sqrt(0.25 * 0.75 / 400), rel=0.15)
    assert half_width(torch.ones(50)) == 0


def test_too_little_is_refused():
    with pytest.raises(Unsupported, match="at least 4"):
        half_split(lambda a, b: 0.0, torch.zeros(3))
    with pytest.raises(Unsupported, match="no values"):
        half_width(torch.zeros(0))


def test_figure_says_its_floor_and_number():
    assert str(Figure(0.5, 0.1, 20)) == "0.5 (floor 0.1, N=20)"
    assert str(Figure(0.5, None, 20, "beware")) == "0.5 (no floor, N=20, beware)"
