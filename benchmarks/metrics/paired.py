"""Paired figures: the same seed, accelerated against baseline. For techniques that promise the same picture."""

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from ...accel.errors import Unsupported

WINDOW = 7
PSNR_CAP = 100.0  # dB, of equal pictures in a mean; theirs is infinite


def psnr(images: Tensor, reference: Tensor) -> Tensor:
    """Peak signal to noise ratio in dB of each image, (N,); inf where equal.

    Both (N, 3, H, W) floats in 0..1.
    """
    check_pair(images, reference)
    error = (images.double() - reference.double()).square().mean(dim=(1, 2, 3))
    return -10 * error.log10()


def ssim(images: Tensor, reference: Tensor) -> Tensor:
    """Structural similarity of each image, (N,), 1 where equal. Both (N, 3, H, W) floats in 0..1, sides >= 7.

    Wang et al. 2004, "Image quality assessment", eq. 13, with a uniform 7x7 window and sample covariances, mean over
    channels: scikit-image's default.
    """
    check_pair(images, reference)
    if min(images.shape[-2:]) < WINDOW:
        raise Unsupported(f"ssim needs images of at least {WINDOW}x{WINDOW} pixels, not {tuple(images.shape[-2:])}")
    x, y = images.double(), reference.double()
    mean_x, mean_y = avg_pool2d(x, WINDOW, 1), avg_pool2d(y, WINDOW, 1)
    sample = WINDOW**2 / (WINDOW**2 - 1)
    var_x = sample * (avg_pool2d(x * x, WINDOW, 1) - mean_x**2)
    var_y = sample * (avg_pool2d(y * y, WINDOW, 1) - mean_y**2)
    cov = sample * (avg_pool2d(x * y, WINDOW, 1) - mean_x * mean_y)
    c1, c2 = 0.01**2, 0.03**2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return (luminance * (2 * cov + c2) / (var_x + var_y + c2)).mean(dim=(1, 2, 3))


def means(images: Tensor, reference: Tensor) -> dict[str, float]:
    """`psnr` in dB, of equal pictures `PSNR_CAP`, and `ssim`, over all pairs."""
    decibels = psnr(images, reference).clamp(max=PSNR_CAP)
    return {"psnr": decibels.mean().item(), "ssim": ssim(images, reference).mean().item()}


def check_pair(images: Tensor, reference: Tensor) -> None:
    if images.shape != reference.shape or images.dim() != 4:
        raise Unsupported(f"paired images must be two (N, 3, H, W) of one shape, not {images.shape}, {reference.shape}")
    if not (images.is_floating_point() and reference.is_floating_point()):
        raise Unsupported("images must be floats in 0..1: divide uint8 by 255")
    for name, batch in (("images", images), ("reference", reference)):
        if batch.numel() and not torch.all((batch >= 0) & (batch <= 1)):
            raise Unsupported(f"{name} leave 0..1 (from {batch.min():.3g} to {batch.max():.3g}, or NaN): clamp them")
