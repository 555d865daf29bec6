"""Which prompts are measured: captions of the embedded model's data, or the user's own file."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..accel.errors import InvalidConfig
from ..accel.zoo.embedded import EMBEDDED
from .data.reference import reference


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """`places`, `concepts` and `styles` index the embedded data's; None where nobody knows what a picture must show."""

    captions: list[str]
    places: list[int] | None = None
    concepts: list[int] | None = None
    styles: list[int] | None = None


def drawn(split: str, count: int, seed: int) -> Prompts:
    """`count` captions of the embedded data's split, "train" or "test", drawn by seed."""
    if split not in ("train", "test"):
        raise InvalidConfig(f"--split {split!r} is not one of train, test")
    data = reference()
    places = data.indices(split)
    if count > len(places):
        raise InvalidConfig(f"--count {count} is more than the {len(places)} captions of the split {split}")
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:count]
    chosen = places[order].tolist()
    return Prompts(
        captions=[data.caption(i) for i in chosen],
        places=chosen,
        concepts=data.concept[chosen].tolist(),
        styles=data.style[chosen].tolist(),
    )


def choose(model: str, file: Path | None, split: str, count: int, seed: int) -> Prompts:
    """The file's prompts, repeated to `count`; without a file, an embedded model's own captions."""
    if file is None:
        if model not in EMBEDDED:
            known = ", ".join(EMBEDDED)
            raise InvalidConfig(f"give --prompts FILE for {model}: only embedded models ({known}) bring their captions")
        return drawn(split, count, seed)
    if not file.is_file():
        raise InvalidConfig(f"--prompts {file}: there is no such file")
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidConfig(f"--prompts {file} holds no prompts: one a line")
    return Prompts(captions=[lines[i % len(lines)] for i in range(count)])
