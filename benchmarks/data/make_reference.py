"""Makes reference.npz from the emoji set: `python -m fewstep.benchmarks.data.make_reference EMOJI64.npz`."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch.nn.functional import avg_pool2d

from ...distill.data import DataConfig, EmojiData
from ..metrics.distribution import Gaussian
from ..metrics.features import extract
from .reference import FILE

HEADS = 500  # rows of head features a split: KID draws subsets of 500


def main(
    emoji: Annotated[Path, typer.Argument(help="emoji64.npz, as make_emoji writes it")],
    out: Annotated[Path, typer.Option(help="where to write")] = Path(__file__).parent / FILE,
) -> None:
    """Gallery at 16x16 pixels, and features of the training and the held-out pictures."""
    data = EmojiData(DataConfig(path=str(emoji)))
    groups = data.config.groups
    pixels = avg_pool2d(data.pixels.float(), data.pixels.shape[-1] // 16)
    arrays: dict[str, Any] = {
        "gallery": pixels.round().byte().numpy(),
        "concept": data.concept.astype(np.int16),
        "style": data.style.astype(np.uint8),
        "held_out": np.isin(np.arange(len(data.concept)), data.test),
        "labels": np.array(data.labels),
        "styles": np.array(data.styles),
        "group": np.array([groups.index(g) if g in groups else -1 for g in data.group], np.int8),
        "groups": np.array(groups),
    }
    for split, indices in (("train", data.train), ("test", data.test)):
        arrays |= features(data, indices, split)
    np.savez_compressed(out, **arrays)
    typer.echo(f"{out}: {len(data.concept)} pictures, {out.stat().st_size / 1e6:.1f} MB")


def features(data: EmojiData, indices: np.ndarray, split: str) -> dict[str, Any]:
    found = extract(data.images(indices) / 2 + 0.5)
    gaussian = Gaussian.of(found.block10)
    chosen = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))[:HEADS]
    return {
        f"head_{split}": found.head[chosen].half().numpy(),
        f"block10_mean_{split}": gaussian.mean.float().numpy(),
        f"block10_cov_{split}": gaussian.cov.float().numpy(),
        f"block10_n_{split}": np.array(gaussian.n),
    }


if __name__ == "__main__":
    typer.run(main)
