"""All figures of one set of pictures, each with its floor, as one flat row of a table."""

from typing import Any

from torch import Tensor

from .data.reference import reference as embedded
from .metrics.distribution import kid_figure, mmd2
from .metrics.features import Features, extract
from .metrics.judge import judged
from .metrics.noise_floor import half_width
from .metrics.paired import means
from .metrics.perceptual import perceptual
from .metrics.retrieval import Gallery, hits
from .prompts import Prompts


class Quality:
    """Measures pictures against the reference setting's from the same seeds.

    `again`: the reference's pictures of the same prompts from other seeds, the floor: what chance alone gives.
    """

    def __init__(self, prompts: Prompts, reference: Tensor, again: Tensor) -> None:
        self.prompts, self.reference = prompts, reference
        self.head = extract(reference).head.double()
        self.floors = {f"{k}_floor": v for k, v in self.paired(again).items()}
        self.floors |= {"kid_floor": abs(self.kid(extract(again)))}

    def of(self, images: Tensor) -> dict[str, Any]:
        features = extract(images)
        row: dict[str, Any] = self.paired(images) | {"kid": self.kid(features)} | self.floors
        row |= meaning(images, self.prompts) | to_data(features, self.prompts)
        return row | {"count": len(images)}

    def kid(self, features: Features) -> float:
        """To the reference's pictures, over all of both."""
        return mmd2(features.head.double(), self.head, paired=True)

    def paired(self, images: Tensor) -> dict[str, float]:
        return means(images, self.reference) | {"perceptual": perceptual(images, self.reference).mean().item()}


def meaning(images: Tensor, prompts: Prompts) -> dict[str, float]:
    """Caption retrieval and the judge's verdict, each with the half width of its 95 % interval.

    Nothing where nobody knows what a picture must show.
    """
    if prompts.concepts is None or prompts.styles is None:
        return {}
    data = embedded()
    gallery = Gallery(images=data.gallery, concept=data.concept, style=data.style)
    row: dict[str, float] = {}
    for rank, found in hits(images, prompts.concepts, prompts.styles, gallery).items():
        row |= {f"top{rank}": found.double().mean().item(), f"top{rank}_floor": half_width(found.double())}
    return row | judged(images, data.group[prompts.concepts], prompts.styles)


def to_data(features: Features, prompts: Prompts) -> dict[str, float | None]:
    """KID to the training pictures, where the captions are theirs."""
    if prompts.concepts is None:
        return {}
    figure = kid_figure(features, embedded().head["train"])
    return {"kid_data": figure.value, "kid_data_floor": figure.floor}
