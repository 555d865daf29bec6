"""psnr and ssim are scikit-image's."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.metrics.paired import PSNR_CAP, means, psnr, ssim


@pytest.fixture(params=[(7, 7), (16, 12), (33, 64)], ids=str)
def pair(request):
    draw = torch.Generator().manual_seed(0)
    reference = torch.rand(3, 3, *request.param, generator=draw)
    noise = torch.randn(reference.shape, generator=draw) * torch.tensor([0.02, 0.1, 0.5]).view(3, 1, 1, 1)
    return (reference + noise).clamp(0, 1), reference


def test_psnr_equals_scikit_image(pair):
    images, reference = (x.double().numpy() for x in pair)
    wanted = [peak_signal_noise_ratio(r, i, data_range=1) for i, r in zip(images, reference, strict=True)]
    np.testing.assert_allclose(psnr(*pair), wanted, rtol=1e-9)


def test_ssim_equals_scikit_image(pair):
    images, reference = (x.double().numpy() for x in pair)
    wanted = [structural_similarity(r, i, data_range=1, channel_axis=0) for i, r in zip(images, reference, strict=True)]
    np.testing.assert_allclose(ssim(*pair), wanted, rtol=1e-7, atol=1e-9)


def test_equal_pictures(pair):
    _, reference = pair
    assert psnr(reference, reference).tolist() == [math.inf] * 3
    assert ssim(reference, reference).tolist() == pytest.approx([1, 1, 1])
    assert means(reference, reference) == {"psnr": PSNR_CAP, "ssim": pytest.approx(1)}


def test_known_psnr():
    assert psnr(torch.zeros(1, 3, 8, 8), torch.full((1, 3, 8, 8), 0.1)).item() == pytest.approx(20, abs=1e-5)


GOOD = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 8, 9), "one shape"),
        (GOOD.byte(), "divide uint8 by 255"),
        (GOOD - 0.1, "leave 0..1"),
        (GOOD * math.nan, "leave 0..1"),
    ],
)
def test_misfits_are_refused(images, message):
    for figure in (psnr, ssim):
        with pytest.raises(Unsupported, match=message):
            figure(images, GOOD)


def test_ssim_refuses_pictures_below_its_window():
    with pytest.raises(Unsupported, match="at least 7x7"):
        ssim(torch.zeros(1, 3, 6, 9), torch.zeros(1, 3, 6, 9))
