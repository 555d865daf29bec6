"""KID and Frechet distance against their definitions."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.metrics.distribution import Gaussian, frechet, frechet_figure, kid, kid_figure, mmd2
from fewstep.benchmarks.metrics.features import Features


def rows(n, d=6, seed=0, shift=0.0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def features(n, seed=0):
    return Features(block4=rows(n, 4, seed), block10=rows(n, 8, seed), block15=rows(n, 4, seed), head=rows(n, 16, seed))


def brute_force(x, y):
    def kernel(a, b):
        return (sum(float(p * q) for p, q in zip(a, b, strict=True)) / len(a) + 1) ** 3

    n, m = len(x), len(y)
    same_x = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    same_y = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return same_x + same_y - 2 * sum(kernel(a, b) for a in x for b in y) / (n * m)


def test_mmd_equals_a_double_loop():
    x, y = rows(9), rows(7, seed=1, shift=0.3)
    assert mmd2(x, y) == pytest.approx(brute_force(x, y), rel=1e-9)
    assert kid(x, rows(9, seed=2)).value == pytest.approx(brute_force(x, rows(9, seed=2)), rel=1e-9)


def test_pairs_are_left_out():
    """Rows that share their seed: without the pairs unbiased, and 0 where equal; with them far below."""
    x = rows(12)
    assert mmd2(x, x, paired=True) == pytest.approx(0, abs=1e-12) and mmd2(x, x) < -1
    draws = [(rows(12, seed=k), rows(12, seed=k + 1000)) for k in range(300)]
    values = np.array([mmd2(a, 0.8 * a + 0.6 * b, paired=True) for a, b in draws])  # again of unit variance
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(len(values))


def test_kid_is_unbiased():
    """Sets of one distribution: the mean over many draws is zero within its error, and either sign occurs."""
    values = np.array([kid(rows(12, seed=2 * k), rows(12, seed=2 * k + 1)).value for k in range(300)])
    assert abs(values.mean()) < 3 * values.std() / math.sqrt(len(values))
    assert (values < 0).any() and (values > 0).any()


def test_kid_grows_with_the_shift():
    near, far = (kid(rows(100), rows(100, seed=1, shift=s)).value for s in (0.3, 1.0))
    assert abs(kid(rows(100), rows(100, seed=1)).value) < near < far


def test_subsets_agree_with_the_whole_and_give_an_error():
    x, y = rows(300), rows(300, seed=1, shift=0.5)
    whole, parts = kid(x, y), kid(x, y, subsets=50, subset_size=60)
    assert math.isnan(whole.standard_error) and parts.standard_error > 0
    assert parts.value == pytest.approx(whole.value, abs=6 * parts.standard_error)
    assert kid(x, y, subset_size=60) == parts  # drawn by seed


def test_frechet_of_known_gaussians():
    one = Gaussian(mean=torch.zeros(3).double(), cov=torch.diag(torch.tensor([1.0, 4.0, 9.0])).double(), n=9)
    two = Gaussian(mean=torch.tensor([2.0, 0.0, 0.0]).double(), cov=torch.diag(torch.tensor([4.0, 4, 1])).double(), n=9)
    assert frechet(one, two) == pytest.approx(4 + (1 - 2) ** 2 + 0 + (3 - 1) ** 2)
    assert frechet(one, one) == pytest.approx(0, abs=1e-9)


def test_frechet_equals_sqrtm():
    a, b = Gaussian.of(rows(40)), Gaussian.of(rows(50, seed=1) @ rows(6, seed=2))
    root = scipy.linalg.sqrtm(a.cov.numpy() @ b.cov.numpy())
    wanted = float((a.mean - b.mean).square().sum() + a.cov.trace() + b.cov.trace()) - 2 * np.trace(root).real
    assert frechet(a, b) == pytest.approx(wanted, rel=1e-8)
    assert frechet(a, b) == pytest.approx(frechet(b, a), rel=1e-8)


def test_frechet_stands_fewer_rows_than_dimensions():
    a, b = Gaussian.of(rows(4, 20)), Gaussian.of(rows(4, 20, seed=1))
    assert math.isfinite(frechet(a, b)) and frechet(a, a) == pytest.approx(0, abs=1e-4)


def test_gaussian_equals_numpy():
    x = rows(30)
    found = Gaussian.of(x)
    np.testing.assert_allclose(found.cov, np.cov(x.numpy().T))
    np.testing.assert_allclose(found.mean, x.numpy().mean(0))
    assert found.n == 30


def test_figures_carry_their_floor():
    same, other = kid_figure(features(60), rows(60, 16, seed=9)), kid_figure(features(60), rows(60, 16, 9, shift=2.0))
    assert same.n == 60 and same.floor > 0
    assert abs(same.value) < 5 * same.floor and other.value > 20 * other.floor
    few = frechet_figure(features(60), Gaussian.of(rows(2000, 8, seed=1)))
    assert "too few" in few.note and 0 < few.value < few.floor * 2
    assert frechet_figure(features(1000), Gaussian.of(rows(1000, 8, seed=1))).note == ""


def test_frechet_floor_is_what_as_many_true_rows_give():
    scale = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    real = Gaussian.of(rows(5000, 8, seed=1) @ scale)
    true = np.mean([frechet(Gaussian.of(rows(200, 8, seed=k) @ scale), real) for k in range(10, 30)])
    assert frechet(Gaussian.of(real.draw(200)), real) == pytest.approx(true, rel=0.5)
    torch.testing.assert_close(Gaussian.of(real.draw(20000)).cov, real.cov, rtol=0.1, atol=1)


def test_too_few_are_refused():
    with pytest.raises(Unsupported, match="at least two"):
        kid(rows(1), rows(5))
    with pytest.raises(Unsupported, match="at least two"):
        Gaussian.of(rows(1))
