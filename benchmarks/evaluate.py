"""The zoo card's figures of an embedded model: `python -m fewstep.benchmarks.evaluate --out benchmarks/results`.

Retrieval of training and held-out captions beside what real pictures score after the autoencoder alone, KID and Frechet
distance to the training pictures with their floors, and the grids to look at.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from ..accel.pipeline import AcceleratedPipeline
from ..accel.recipe import Recipe
from ..accel.solver import SwapScheduler
from ..accel.zoo import embedded
from ..distill.data import DataConfig, EmojiData
from .data.reference import reference
from .metrics.distribution import frechet_figure, kid_figure
from .metrics.features import extract
from .metrics.paired import psnr
from .pictures import generate
from .prompts import Prompts, drawn
from .quality import meaning
from .report import grid
from .sweep import Setting
from .timing import machine

Out = Annotated[Path, typer.Option(help="folder for emoji-unet.json and the grids")]


def main(
    out: Out = Path("benchmarks/results"),
    count: Annotated[int, typer.Option(min=20, help="captions of each split")] = 500,
    steps: Annotated[int, typer.Option(help="of dpmpp_2m")] = 25,
    guidance: Annotated[float, typer.Option()] = 3.0,
    data: Annotated[Path, typer.Option(help="emoji64.npz, for the ceiling")] = Path("data/emoji64.npz"),
) -> None:
    """Measures emoji-unet and draws its grids of 20 captions drawn by seed 0 from each split."""
    pipe = embedded.load("emoji-unet")
    pipe.set_progress_bar_config(disable=True)
    fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler("dpmpp_2m")))
    setting = Setting(scheduler="dpmpp_2m", steps=steps, guidance=guidance)
    emoji = EmojiData(DataConfig(path=str(data)))
    found: dict[str, Any] = {"setting": setting.key, "count": count, "machine": machine()}
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        prompts = drawn(split, count, 0)
        images = generate(fast, prompts.captions, range(count), **setting.options)
        found[split] = meaning(images, prompts) | {"ceiling": ceiling(pipe, emoji, prompts)}
        found[split] |= distances(images) if split == "train" else {}
        draw(images, prompts.captions, out / f"emoji-unet-{split}.png")
    (out / "emoji-unet.json").write_text(json.dumps(found, indent=1) + "\n")
    typer.echo(json.dumps(found, indent=1))


def draw(images: Tensor, captions: Sequence[str], file: Path, count: int = 20, across: int = 4) -> None:
    """The first pictures in rows, their captions at the left, one a line."""
    labels = ["\n".join(captions[i : i + across]) for i in range(0, count, across)]
    grid(images[:count].split(across), labels, margin=250).save(file)


def distances(images: Tensor) -> dict[str, str]:
    """To the training pictures, each with its floor."""
    features, data = extract(images), reference()
    kid, fd = kid_figure(features, data.head["train"]), frechet_figure(features, data.block10["train"])
    return {"kid_data": str(kid), "frechet_data": str(fd)}


@torch.no_grad()
def ceiling(pipe: Any, emoji: EmojiData, prompts: Prompts) -> dict[str, float]:
    """What the captions' true pictures score after the autoencoder alone: no sampler can be expected to beat it."""
    real = emoji.images(torch.tensor(prompts.places))
    parts = [pipe.vae.decode(pipe.vae.encode(x).latent_dist.mean).sample for x in real.split(32)]
    rebuilt, real = (torch.cat(parts) / 2 + 0.5).clamp(0, 1), real / 2 + 0.5
    return meaning(rebuilt, prompts) | {"psnr": psnr(rebuilt, real).mean().item()}


if __name__ == "__main__":
    typer.run(main)
