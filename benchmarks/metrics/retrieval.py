"""Does the picture show its caption: is the nearest real picture of the wanted style one of the wanted concept?

Nearest in plain pixels at 16x16, which a blurred but right shape passes and a crisp wrong one does not. Read it against
`ceiling`: what true pictures score after the autoencoder alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ...accel.errors import Unsupported

RANKS = (1, 5)


@dataclass(frozen=True, kw_only=True)
class Gallery:
    """Real pictures (N, 3, 16, 16) in 0..1 with the index of their concept and style."""

    images: Tensor
    concept: Tensor
    style: Tensor


def hits(images: Tensor, concepts: Sequence[int], styles: Sequence[int], gallery: Gallery) -> dict[int, Tensor]:
    """For rank 1 and 5: whether each of (N, 3, H, W) pictures in 0..1 finds its concept, (N,) bool.

    A picture is compared with the gallery's pictures of its own style. Raises Unsupported for a style without any.
    """
    small = adaptive_avg_pool2d(images.float(), gallery.images.shape[-1])
    found = [nearest(row, style, gallery) for row, style in zip(small, styles, strict=True)]
    wanted = torch.as_tensor(concepts)
    return {k: torch.stack([(near[:k] == want).any() for near, want in zip(found, wanted, strict=True)]) for k in RANKS}


def nearest(image: Tensor, style: int, gallery: Gallery) -> Tensor:
    """Concepts of the five nearest pictures of `style`, nearest first."""
    same = (gallery.style == style).nonzero().flatten()
    if not len(same):
        raise Unsupported(f"the gallery has no picture of style {style}")
    distance = (gallery.images[same] - image).square().sum(dim=(1, 2, 3))
    order = distance.topk(min(max(RANKS), len(same)), largest=False).indices
    return gallery.concept[same[order]]
