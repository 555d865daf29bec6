"""Does the picture show its caption, as a classifier sees it: the concept's group of six, the drawing style of eight.

A small network of the project's own, trained on the pictures alone (`fewstep train judge`), so a model that pleases the
nearest neighbours of `retrieval` or the ImageNet features of `kid` gains nothing here. It is not above error: read an
accuracy beside what true pictures score after the autoencoder (`ceiling` of evaluate), and beside chance, the largest
class: 25.5 % of the pictures are objects, 16.5 % of one style.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ...accel.errors import Unsupported
from ...distill.judge import Judge, load
from .noise_floor import half_width

FOLDER = Path(__file__).parent.parent / "data" / "emoji-judge"
SIZE = 64


@cache
def judge() -> Judge:
    """The shipped judge, loaded once."""
    return load(FOLDER)


@torch.inference_mode()
def verdicts(images: Tensor, *, batch_size: int = 64) -> dict[str, Tensor]:
    """The likeliest "group" and "style" of (N, 3, H, W) floats in 0..1, each (N,) indices into the judge's names."""
    if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise Unsupported(f"the judge needs (N, 3, H, W) floats in 0..1, not {images.dtype} {tuple(images.shape)}")
    parts = [judge()(2 * sized(x) - 1) for x in images.split(batch_size)]
    return {name: torch.cat([p[name] for p in parts]).argmax(dim=1) for name in ("group", "style")}


def judged(images: Tensor, groups: Sequence[int] | Tensor, styles: Sequence[int] | Tensor) -> dict[str, float]:
    """Shares of pictures whose group and style are judged to be the wanted ones, and their half widths.

    (N, 3, H, W) floats in 0..1; `groups` and `styles` index the names of `data.reference`, which are the judge's.
    """
    found, row = verdicts(images), dict[str, float]()
    for name, wanted in (("group", groups), ("style", styles)):
        right = (found[name] == torch.as_tensor(wanted)).double()
        row |= {f"{name}_accuracy": right.mean().item(), f"{name}_accuracy_floor": half_width(right)}
    return row


def sized(images: Tensor) -> Tensor:
    """At the size that the judge was trained for."""
    if images.shape[-2:] == (SIZE, SIZE):
        return images.float()
    return interpolate(images.float(), (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
