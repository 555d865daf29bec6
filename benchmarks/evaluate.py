"""The zoo card's figures of an embedded model: `python -m fewstep.benchmarks.evaluate --model emoji-unet`.

Retrieval and the judge's verdict for training and held-out captions, beside what real pictures score after the
autoencoder alone; KID and Frechet distance to the training pictures with their floors; how near samples are to training
pictures, beside held-out pictures; and the grids to look at.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from ..accel.errors import InvalidConfig
from ..accel.pipeline import AcceleratedPipeline
from ..accel.recipe import Recipe
from ..accel.solver import SwapScheduler
from ..accel.zoo import embedded
from ..distill.data import DataConfig, EmojiData
from .data.reference import reference
from .metrics.distribution import frechet_figure, kid_figure
from .metrics.features import extract
from .metrics.judge import judged
from .metrics.memorisation import Memorisation
from .metrics.paired import psnr
from .pictures import generate
from .prompts import Prompts, drawn
from .quality import meaning
from .report import grid
from .sweep import Setting
from .timing import machine

# The best solver that was measured for a class of pipelines; others sample with their own scheduler.
SOLVER = {"StableDiffusionPipeline": "dpmpp_2m"}
SHOWN = 8  # samples beside their nearest training pictures
Model = Annotated[str, typer.Option(help=f"an embedded model ({', '.join(embedded.EMBEDDED)}) or a pipeline's folder")]
Name = Annotated[str, typer.Option(help="of the files that are written; without one, the model's own")]


def main(
    model: Model = "emoji-unet",
    name: Name = "",
    out: Annotated[Path, typer.Option(help="folder for NAME.json and the pictures")] = Path("benchmarks/results"),
    count: Annotated[int, typer.Option(min=20, help="captions of each split")] = 500,
    steps: Annotated[int, typer.Option(min=1, help="denoising steps")] = 50,
    guidance: Annotated[float, typer.Option(help="guidance scale")] = 3.0,
    data: Annotated[Path, typer.Option(help="emoji64.npz: what is true, and what was trained on")] = Path(
        "data/emoji64.npz"
    ),
) -> None:
    """Measures a model on the emoji captions and draws its grids of 20 captions drawn by seed 0 from each split."""
    torch.set_num_threads(1)  # a busy neighbour slows two threads far more than one
    pipe, emoji = embedded.load(model), EmojiData(DataConfig(path=str(data)))
    pipe.set_progress_bar_config(disable=True)
    name = name or Path(model).name
    out.mkdir(parents=True, exist_ok=True)
    found = evaluate(pipe, emoji, out / name, count=count, steps=steps, guidance_scale=guidance)
    text = json.dumps({"model": name} | found, indent=1)
    (out / f"{name}.json").write_text(text + "\n")
    typer.echo(text)


def evaluate(pipe: Any, emoji: EmojiData, place: Path, *, count: int, steps: int, guidance_scale: float) -> Any:
    """All figures; the pictures are written as `place`-train.png, -test.png and -memorised.png."""
    fast, setting = sampled(pipe, steps, guidance_scale)
    memory = Memorisation(*(rebuilt(pipe, pictures(emoji, places)) for places in (emoji.train, emoji.test)))
    found: dict[str, Any] = {"setting": setting.key, "count": count, "machine": machine()}
    nearest: dict[str, Sequence[Tensor]] = {}
    for split in ("train", "test"):
        prompts = drawn(split, count, 0)
        images = generate(fast, prompts.captions, range(count), **setting.options)
        found[split] = meaning(images, prompts) | {"ceiling": ceiling(pipe, emoji, prompts)}
        found[split] |= {"memorisation": memory.of(images)} | (distances(images) if split == "train" else {})
        nearest[split] = memory.closest(images, SHOWN)
        draw(images, prompts.captions, Path(f"{place}-{split}.png"))
    found["judge"] = {split: verdict_on_real(emoji, split) for split in ("train", "test")}
    show_nearest(nearest, Path(f"{place}-memorised.png"))
    return found


def sampled(pipe: Any, steps: int, guidance_scale: float) -> tuple[Any, Setting]:
    """The pipeline with the solver that suits its class, and the setting to name in words."""
    solver = SOLVER.get(type(pipe).__name__)
    fast = AcceleratedPipeline(pipe, Recipe(SwapScheduler(solver))) if solver else pipe
    own = type(pipe.scheduler).__name__
    return fast, Setting(scheduler=solver or own, steps=steps, guidance=guidance_scale)


def draw(images: Tensor, captions: Sequence[str], file: Path, count: int = 20, across: int = 4) -> None:
    """The first pictures in rows, their captions at the left, one a line."""
    labels = ["\n".join(captions[i : i + across]) for i in range(0, count, across)]
    grid(images[:count].split(across), labels, margin=250).save(file)


def show_nearest(nearest: dict[str, Sequence[Tensor]], file: Path) -> None:
    """Two rows a split: the samples nearest to training pictures, and below each that training picture."""
    labels = [text for split in nearest for text in (f"samples of\n{split} captions", "nearest\ntraining picture")]
    grid([row for rows in nearest.values() for row in rows], labels).save(file)


def distances(images: Tensor) -> dict[str, str]:
    """To the training pictures, each with its floor."""
    features, data = extract(images), reference()
    kid, fd = kid_figure(features, data.head["train"]), frechet_figure(features, data.block10["train"])
    return {"kid_data": str(kid), "frechet_data": str(fd)}


def ceiling(pipe: Any, emoji: EmojiData, prompts: Prompts) -> dict[str, float]:
    """What the captions' true pictures score after the autoencoder alone: no sampler can be expected to beat it."""
    real = pictures(emoji, prompts.places)
    again = rebuilt(pipe, real)
    return meaning(again, prompts) | {"psnr": psnr(again, real).mean().item()}


def verdict_on_real(emoji: EmojiData, split: str) -> dict[str, float]:
    """How good the judge itself is: on all true pictures of a split, untouched."""
    data, places = reference(), torch.as_tensor(getattr(emoji, split))
    return judged(pictures(emoji, places), data.group[data.concept[places]], data.style[places])


def pictures(emoji: EmojiData, places: np.ndarray | Tensor | Sequence[int] | None) -> Tensor:
    """True ones, (N, 3, 64, 64) in 0..1."""
    if places is None:
        raise InvalidConfig("true pictures are known for captions of the emoji data alone: use prompts.drawn")
    return emoji.images(torch.as_tensor(places)) / 2 + 0.5


@torch.no_grad()
def rebuilt(pipe: Any, images: Tensor) -> Tensor:
    """Pictures in 0..1 after the pipeline's autoencoder."""
    parts = [pipe.vae.decode(pipe.vae.encode(2 * x - 1).latent_dist.mean).sample for x in images.split(32)]
    return (torch.cat(parts) / 2 + 0.5).clamp(0, 1)


if __name__ == "__main__":
    typer.run(main)
