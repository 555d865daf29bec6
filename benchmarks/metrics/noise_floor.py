"""No figure without its floor: what the same figure says of two sets that differ in nothing but their seeds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...accel.errors import Unsupported


@dataclass(frozen=True)
class Figure:
    """A value, the value that chance alone gives, and the number of images behind it.

    `floor` None: nothing to compare with. `note` says what a reader must know before believing the value.
    """

    value: float
    floor: float | None
    n: int
    note: str = ""

    def __str__(self) -> str:
        floor = "no floor" if self.floor is None else f"floor {self.floor:.3g}"
        return f"{self.value:.3g} ({floor}, N={self.n}{', ' + self.note if self.note else ''})"


def half_split(distance: Callable[[Tensor, Tensor], float], items: Tensor, *, splits: int = 5, seed: int = 0) -> float:
    """Mean size of `distance` between random halves of `items`: an upper floor for sets of N, as halves have N/2."""
    if len(items) < 4:
        raise Unsupported(f"a half split needs at least 4 items, not {len(items)}")
    draw = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(splits):
        order, half = torch.randperm(len(items), generator=draw), len(items) // 2
        found.append(abs(distance(items[order[:half]], items[order[half : 2 * half]])))
    return float(np.mean(found))


def half_width(values: Tensor | np.ndarray, *, level: float = 0.95, resamples: int = 1000, seed: int = 0) -> float:
    """Half of the bootstrap interval of the mean of `values`: the floor of a mean, for instance of an accuracy."""
    values = np.asarray(values, np.float64)
    if not len(values):
        raise Unsupported("no values to take a bootstrap of")
    draw = np.random.default_rng(seed).integers(0, len(values), (resamples, len(values)))
    low, high = np.quantile(values[draw].mean(axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(high - low) / 2
