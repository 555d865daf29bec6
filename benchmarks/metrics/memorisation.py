"""Are pictures copies of training pictures: how near each one's nearest training picture is.

Near by itself says little: held-out pictures have near ones in training too (a concept in a sister style). So every
distance stands beside that of held-out pictures, and what counts is the share of samples that are nearer to training
than all but 1 or 5 % of those: 1 or 5 % by chance, 100 % for copies.

Give training and held-out pictures as the autoencoder rebuilds them, for it is in every sample: in features its traces
alone are as far (27) as held-out pictures are from training (28), and copies would not be seen. Soft samples are far
from everything in features and near to everything in pixels: neither space is enough alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...accel.errors import Unsupported
from .features import extract
from .noise_floor import half_width
from .paired import PSNR_CAP

PERCENT = (1, 5)


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Of each of N pictures the nearest training picture: its `place` (N,) and the `distance` to it (N,)."""

    place: Tensor
    distance: Tensor


@dataclass(frozen=True, kw_only=True)
class Space:
    """In what pictures (N, 3, H, W) are compared, and how a distance there is `told`."""

    embed: Callable[[Tensor], Tensor]
    told: Callable[[Tensor], Tensor]


def decibels(rms: Tensor) -> Tensor:
    """PSNR of pictures in 0..1 that differ by `rms`."""
    return (-20 * rms.log10()).clamp(max=PSNR_CAP)


SPACES = {
    "features": Space(embed=lambda x: extract(x).head, told=lambda distance: distance),
    "pixels_psnr": Space(embed=lambda x: x.flatten(1) / x[0].numel() ** 0.5, told=decibels),
}


class Memorisation:
    """Measures pictures (N, 3, H, W) in 0..1 against the `training` pictures, with `held_out` ones for comparison."""

    def __init__(self, training: Tensor, held_out: Tensor) -> None:
        self.training = training
        self.known = {name: space.embed(training) for name, space in SPACES.items()}
        self.usual = {name: found.distance for name, found in self.nearest(held_out).items()}

    def nearest(self, images: Tensor) -> dict[str, Nearest]:
        """In each of `SPACES`."""
        if images.shape[1:] != self.training.shape[1:]:
            raise Unsupported(f"pictures of {tuple(images.shape[1:])} and {tuple(self.training.shape[1:])}: resize one")
        return {name: nearest(space.embed(images), self.known[name]) for name, space in SPACES.items()}

    def of(self, images: Tensor) -> dict[str, dict[str, float]]:
        """For each space the medians of samples and held-out pictures, and how many samples are nearer than usual."""
        return {name: self.figures(name, found.distance) for name, found in self.nearest(images).items()}

    def figures(self, name: str, distance: Tensor) -> dict[str, float]:
        usual, told = self.usual[name], SPACES[name].told
        row = {"median": told(distance.median()).item(), "held_out_median": told(usual.median()).item()}
        for percent in PERCENT:
            near = (distance < usual.quantile(percent / 100)).double()
            key = f"nearer_than_{percent}_percent"
            row |= {key: near.mean().item(), f"{key}_floor": half_width(near)}
        return row

    def closest(self, images: Tensor, count: int = 8) -> tuple[Tensor, Tensor]:
        """The `count` pictures nearest to training in features, nearest first, and those training pictures."""
        found = self.nearest(images)["features"]
        order = found.distance.argsort()[:count]
        return images[order], self.training[found.place[order]]


def nearest(rows: Tensor, known: Tensor) -> Nearest:
    """Euclidean, of rows (N, d) among (M, d); exactly 0 for an equal row."""
    place = torch.cat([torch.cdist(part, known).argmin(dim=1) for part in rows.split(100)])
    return Nearest(place=place, distance=(rows - known[place]).norm(dim=1))
