"""Distances between two sets of images: for fewer steps and for students, where another good picture is fine.

KID on the 1280-d head: unbiased, so usable from a few hundred images on. Frechet distance on the 112-d block 10: biased
upwards by about d / N, so only sets of the same N >= 1000 compare. Neither is "FID": that name means Inception.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...accel.errors import Unsupported
from .features import Features
from .noise_floor import Figure, half_split

FRECHET_LEAST = 1000


@dataclass(frozen=True, kw_only=True)
class Kid:
    """Kernel distance: mean over subsets and its standard error."""

    value: float
    standard_error: float


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Mean (d,) and covariance (d, d) of features, float64, and how many rows they come from."""

    mean: Tensor
    cov: Tensor
    n: int

    @classmethod
    def of(cls, rows: Tensor) -> "Gaussian":
        if len(rows) < 2:
            raise Unsupported(f"a covariance needs at least two images, not {len(rows)}")
        return cls(mean=rows.double().mean(dim=0), cov=torch.cov(rows.double().T), n=len(rows))

    def draw(self, count: int, *, seed: int = 0) -> Tensor:
        """(count, d) rows of this distribution."""
        values, vectors = torch.linalg.eigh(self.cov)
        noise = torch.randn(count, len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return self.mean + noise * values.clamp(min=0).sqrt() @ vectors.T


def kid(x: Tensor, y: Tensor, *, subsets: int = 50, subset_size: int = 500, seed: int = 0) -> Kid:
    """Squared maximum mean discrepancy of rows (N, d) and (M, d), cubic kernel, averaged over random subsets.

    Binkowski et al. 2018, arXiv:1801.01401, section 4; may be negative where sets agree. Subsets are as large as the
    smaller set allows; the standard error is that of the mean over subsets, which overlap: a lower bound.
    """
    size = min(subset_size, len(x), len(y))
    if size < 2:
        raise Unsupported(f"KID needs at least two images a set, not {len(x)} and {len(y)}")
    count = 1 if size == len(x) == len(y) else subsets
    draw, x, y = torch.Generator().manual_seed(seed), x.double(), y.double()

    def some(rows: Tensor) -> Tensor:
        return rows[torch.randperm(len(rows), generator=draw)[:size]]

    values = torch.tensor([mmd2(some(x), some(y)) for _ in range(count)], dtype=torch.float64)
    error = float(values.std() / math.sqrt(count)) if count > 1 else math.nan
    return Kid(value=float(values.mean()), standard_error=error)


def mmd2(x: Tensor, y: Tensor, *, paired: bool = False) -> float:
    """The unbiased estimate of MMD^2 with k(a, b) = (a.b / d + 1)^3. Gretton et al. 2012, eq. 3.

    `paired`: row i of both comes from the same seed or caption. Such pairs are alike by design and would pull the
    estimate far below zero, so they are left out as in eq. 4: equal sets then have exactly 0.
    """
    n, m = len(x), len(y)
    within_x, within_y, across = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    same_x = (within_x.sum() - within_x.diagonal().sum()) / (n * (n - 1))
    same_y = (within_y.sum() - within_y.diagonal().sum()) / (m * (m - 1))
    between = (across.sum() - across.diagonal().sum()) / (n * (n - 1)) if paired else across.mean()
    return float(same_x + same_y - 2 * between)


def frechet(a: Gaussian, b: Gaussian) -> float:
    """Squared 2-Wasserstein distance of two Gaussians. Dowson & Landau 1982; Heusel et al. 2017, arXiv:1706.08500."""
    # trace sqrt(A B) = sum of sqrt of the eigenvalues of sqrt(A) B sqrt(A), which is symmetric: no complex roots.
    values, vectors = torch.linalg.eigh(a.cov)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    cross = torch.linalg.eigvalsh(root @ b.cov @ root).clamp(min=0).sqrt().sum()
    return float((a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace() - 2 * cross)


def kid_figure(fake: Features, real: Tensor, **options: int) -> Figure:
    """KID of the head features to `real` rows (M, 1280); the floor is `real` against itself, in halves."""

    def distance(a: Tensor, b: Tensor) -> float:
        return kid(a, b, **options).value

    found = kid(fake.head, real, **options)
    note = "" if math.isnan(found.standard_error) else f"s.e. {found.standard_error:.1g}"
    return Figure(found.value, half_split(distance, real), len(fake), note)


def frechet_figure(fake: Features, real: Gaussian) -> Figure:
    """Frechet distance of block 10 to `real`; its floor that of as many draws from `real`. Flagged below 1000 images.

    Halves of `fake` would not do: the bias falls with N, so they give four times what N true pictures give.
    """
    floor = frechet(Gaussian.of(real.draw(len(fake))), real)
    note = "" if min(len(fake), real.n) >= FRECHET_LEAST else f"too few: biased below N={FRECHET_LEAST}"
    return Figure(frechet(Gaussian.of(fake.block10), real), floor, len(fake), note)
