"""The emoji set: 64x64 pictures with captions in eight drawing styles, and its train and test split."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..accel.errors import InvalidConfig

GROUPS = ("animals & nature", "food & drink", "smileys & emotion", "objects", "travel & places", "activities")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`path` is made by `python -m fewstep.benchmarks.data.make_emoji`."""

    path: str
    groups: tuple[str, ...] = GROUPS
    held_out: float = 0.1
    seed: int = 0


class EmojiData:
    """Pictures of the chosen groups. Held out: a share of the (concept, style) pairs; each concept stays in a style."""

    def __init__(self, config: DataConfig) -> None:
        if not Path(config.path).exists():
            raise InvalidConfig(
                f"no training images at {config.path}: make them with python -m fewstep.benchmarks.data.make_emoji"
            )
        raw = np.load(config.path)
        concept = raw["concept"].astype(np.int64)
        unknown = set(config.groups) - set(raw["group"].tolist())
        if unknown:
            raise InvalidConfig(f"unknown data.groups {sorted(unknown)}; known: {sorted(set(raw['group'].tolist()))}")
        keep = (concept >= 0) & np.isin(raw["group"][concept], config.groups)
        self.config = config
        self.pixels = torch.from_numpy(raw["X"][keep]).permute(0, 3, 1, 2).contiguous()  # (N, 3, 64, 64) uint8
        self.concept, self.style = concept[keep], raw["style"][keep].astype(np.int64)
        self.styles: list[str] = raw["styles"].tolist()
        self.labels: list[str] = raw["labels"].tolist()
        self.tags: list[list[str]] = [t.split("|") if t else [] for t in raw["tags"].tolist()]
        self.group: list[str] = raw["group"].tolist()

    @cached_property
    def test(self) -> np.ndarray:
        """Indices of the held-out pictures: drawn by seed, each concept keeping a picture in another style."""
        order = np.random.default_rng(self.config.seed).permutation(len(self.concept))
        left = np.bincount(self.concept, minlength=len(self.labels))
        wanted, chosen = round(self.config.held_out * len(order)), []
        for index in order:
            if len(chosen) < wanted and left[self.concept[index]] > 1:
                left[self.concept[index]] -= 1
                chosen.append(index)
        return np.sort(np.array(chosen, dtype=np.int64))

    @cached_property
    def train(self) -> np.ndarray:
        return np.setdiff1d(np.arange(len(self.concept)), self.test)

    def caption(self, index: int) -> str:
        return f"{self.labels[self.concept[index]]}, {self.styles[self.style[index]]} style"

    def images(self, indices: np.ndarray | Tensor) -> Tensor:
        """(N, 3, 64, 64) float32 in -1..1."""
        return self.pixels[torch.as_tensor(indices)].float() / 127.5 - 1
