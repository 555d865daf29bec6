"""What the metrics compare with, small enough to travel with the package: made by `make_reference`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..metrics.distribution import Gaussian

FILE = "reference.npz"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The emoji that the embedded models learnt from, and those held out, at 16x16 pixels, with features of both."""

    gallery: Tensor  # (N, 3, 16, 16) float32 in 0..1
    concept: Tensor  # (N,) index into `labels`
    style: Tensor  # (N,) index into `styles`
    held_out: Tensor  # (N,) bool
    labels: list[str]
    styles: list[str]
    group: Tensor  # (labels,) index into `groups`; -1 where none of the pictures is of that group
    groups: list[str]
    head: dict[str, Tensor]  # split -> (500, 1280) float32
    block10: dict[str, Gaussian]  # split -> mean and covariance of all its pictures

    def caption(self, index: int) -> str:
        return f"{self.labels[int(self.concept[index])]}, {self.styles[int(self.style[index])]} style"

    def indices(self, split: str) -> Tensor:
        """Places of a split, "train" or "test", in the gallery."""
        return (self.held_out if split == "test" else ~self.held_out).nonzero().flatten()


@cache
def reference() -> Reference:
    with np.load(Path(__file__).parent / FILE) as raw:
        arrays = {name: raw[name] for name in raw.files}
    return Reference(
        gallery=torch.from_numpy(arrays["gallery"]).float() / 255,
        concept=torch.from_numpy(arrays["concept"].astype(np.int64)),
        style=torch.from_numpy(arrays["style"].astype(np.int64)),
        held_out=torch.from_numpy(arrays["held_out"]),
        labels=arrays["labels"].tolist(),
        styles=arrays["styles"].tolist(),
        group=torch.from_numpy(arrays["group"].astype(np.int64)),
        groups=arrays["groups"].tolist(),
        head={split: torch.from_numpy(arrays[f"head_{split}"]).float() for split in ("train", "test")},
        block10={split: gaussian(arrays, split) for split in ("train", "test")},
    )


def gaussian(arrays: dict[str, np.ndarray], split: str) -> Gaussian:
    mean, cov = (torch.from_numpy(arrays[f"block10_{part}_{split}"]).double() for part in ("mean", "cov"))
    return Gaussian(mean=mean, cov=cov, n=int(arrays[f"block10_n_{split}"]))
