"""The perceptual distance is zero for equal pictures and orders changes as an eye would."""

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from fewstep.benchmarks.data.reference import reference
from fewstep.benchmarks.metrics.perceptual import perceptual


@pytest.fixture(scope="module")
def pictures():
    small = reference().gallery[::600][:10]
    return interpolate(small, scale_factor=4, mode="bilinear").clamp(0, 1)


def blur(images, width):
    return avg_pool2d(images, width, 1, padding=width // 2, count_include_pad=False)


def test_equal_pictures_have_none(pictures):
    assert perceptual(pictures[:3], pictures[:3]).tolist() == [0, 0, 0]


def test_order(pictures):
    changes = [pictures.roll(1, dims=3), blur(pictures, 7), pictures.roll(1, dims=0)]
    shifted, blurred, another = (perceptual(x, pictures).mean().item() for x in changes)
    assert 0 < shifted < blurred < another < 2


def test_noise_too_faint_to_see_counts_little(pictures):
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(0)) * 2 / 255
    another = perceptual(pictures.roll(1, dims=0), pictures).mean()
    assert perceptual((pictures + noise).clamp(0, 1), pictures).mean() < 0.17 * another


def test_symmetric_and_independent_of_batches(pictures):
    a, b = pictures[:5], pictures[5:]
    torch.testing.assert_close(perceptual(a, b), perceptual(b, a))
    torch.testing.assert_close(perceptual(a, b, batch_size=2), perceptual(a, b), rtol=1e-4, atol=1e-5)
