"""Copies of training pictures are found, and nothing else is called one. Pictures: random blots."""

import pytest
import torch
from torch.nn.functional import interpolate

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.metrics.memorisation import SPACES, Memorisation, nearest
from fewstep.benchmarks.metrics.paired import psnr


def blots(count, seed):
    small = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return interpolate(small, (32, 32), mode="bicubic").clamp(0, 1)


@pytest.fixture(scope="module")
def training():
    return blots(60, 0)


@pytest.fixture(scope="module")
def memory(training):
    return Memorisation(training, blots(100, 1))


def test_copies_are_at_distance_zero_and_counted(memory, training):
    samples = torch.cat([training[[5, 17, 40]], blots(27, 2)])
    for name, found in memory.nearest(samples).items():
        assert found.place[:3].tolist() == [5, 17, 40]
        assert found.distance[:3].max() == pytest.approx(0, abs=1e-4)
        assert found.distance[3:].min() > 10 * found.distance[:3].max()
        assert memory.of(samples)[name]["nearer_than_1_percent"] >= 0.1


@pytest.mark.parametrize("space", SPACES)
def test_all_copies_and_no_copies(memory, training, space):
    copied, fresh = memory.of(training[:30])[space], memory.of(blots(100, 3))[space]
    assert copied["nearer_than_1_percent"] == copied["nearer_than_5_percent"] == 1
    assert fresh["nearer_than_1_percent"] <= 0.05 and fresh["nearer_than_5_percent"] <= 0.15  # by chance .01 and .05
    assert fresh["median"] == pytest.approx(fresh["held_out_median"], rel=0.1)
    assert fresh["nearer_than_5_percent_floor"] >= fresh["nearer_than_1_percent_floor"] >= 0


def test_pixels_are_told_as_psnr(memory, training):
    sample = (training[7:8] + 0.02).clamp(0, 1)
    expected = psnr(sample, training[7:8]).item()
    assert memory.of(sample)["pixels_psnr"]["median"] == pytest.approx(expected, rel=1e-3)
    assert memory.of(training[:2])["pixels_psnr"]["median"] == 100


def test_the_closest_are_shown_beside_their_neighbours(memory, training):
    samples = torch.cat([blots(6, 4), training[11:13]])
    shown, beside = memory.closest(samples, 2)
    assert torch.equal(shown, beside)
    assert sorted(memory.nearest(shown)["pixels_psnr"].place.tolist()) == [11, 12]


def test_nearest_is_the_nearest():
    draw = torch.Generator().manual_seed(0)
    rows, known = torch.randn(150, 7, generator=draw), torch.randn(40, 7, generator=draw)
    found, full = nearest(rows, known), (rows[:, None] - known).norm(dim=2)
    assert torch.equal(found.place, full.argmin(dim=1))
    torch.testing.assert_close(found.distance, full.amin(dim=1))


def test_pictures_of_another_size_are_refused(memory):
    with pytest.raises(Unsupported, match="resize one"):
        memory.of(torch.rand(2, 3, 16, 16))
