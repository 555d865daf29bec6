"""All figures of one set of pictures, each with its floor, as one flat row of a table."""

from typing import Any

from torch import Tensor

from .metrics.distribution import kid
from .metrics.features import extract
from .metrics.noise_floor import half_width
from .metrics.paired import psnr, ssim
from .metrics.perceptual import perceptual
from .metrics.retrieval import Gallery, hits
from .data.reference import reference as embedded
from .prompts import Prompts

PSNR_CAP = 100.0  # dB; equal pictures have no finite one


class Quality:
    """Measures pictures against the reference setting's from the same seeds.

    `again`: the reference's pictures of the same prompts from other seeds, the floor: what chance alone gives.
    """

    def __init__(self, prompts: Prompts, reference: Tensor, again: Tensor) -> None:
        self.prompts, self.reference = prompts, reference
        self.head = extract(reference).head
        self.floors = {f"{k}_floor": v for k, v in self.paired(again).items()}
        self.floors |= {"kid_floor": abs(kid(extract(again).head, self.head).value)}

    def of(self, images: Tensor) -> dict[str, Any]:
        found = kid(extract(images).head, self.head)
        row: dict[str, Any] = self.paired(images) | {"kid": found.value, "count": len(images)} | self.floors
        return row | meaning(images, self.prompts)

    def paired(self, images: Tensor) -> dict[str, float]:
        decibels = psnr(images, self.reference).clamp(max=PSNR_CAP)
        return {
            "psnr": decibels.mean().item(),
            "ssim": ssim(images, self.reference).mean().item(),
            "perceptual": perceptual(images, self.reference).mean().item(),
        }


def meaning(images: Tensor, prompts: Prompts) -> dict[str, float]:
    """Caption retrieval with the half width of its 95 % interval, where it is known what a picture must show."""
    if prompts.concepts is None or prompts.styles is None:
        return {}
    data = embedded()
    gallery = Gallery(images=data.gallery, concept=data.concept, style=data.style)
    row: dict[str, float] = {}
    for rank, found in hits(images, prompts.concepts, prompts.styles, gallery).items():
        row |= {f"top{rank}": found.double().mean().item(), f"top{rank}_floor": half_width(found.double())}
    return row
