"""Each technique and preset against the plain pipeline on emoji-unet: `python -m fewstep.benchmarks.recipes`.

Interleaved, one thread, one picture a call, the same steps; pictures of the same seeds say what it cost.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from torch import Tensor

from ..accel.cache.cross_attention import CrossAttentionCache
from ..accel.cache.text import TextCache
from ..accel.kernels.compile import CompileBlocks
from ..accel.kernels.memory_format import ChannelsLast
from ..accel.kernels.precision import Bfloat16
from ..accel.pipeline import AcceleratedPipeline
from ..accel.recipe import Recipe
from ..accel.solver import SwapScheduler
from ..accel.zoo import embedded
from .metrics.paired import means
from .pictures import generate
from .prompts import drawn
from .timing import Comparison, compare, machine

RECIPES: dict[str, Recipe | str] = {
    "plain (noise floor)": Recipe(),
    "text_cache": Recipe(TextCache()),
    "cross_attention_cache": Recipe(CrossAttentionCache()),
    "channels_last": Recipe(ChannelsLast()),
    "bfloat16": Recipe(Bfloat16()),
    "compile_blocks": Recipe(CompileBlocks()),
    "exact": "exact",
    "precise": "precise",
    "balanced": "balanced",
    "fast": "fast",
    "fast, fair": "fast",
}
# Beside what a recipe is timed where that is not the plain pipeline: the fewest steps that anyone would run.
BASELINES = {"fast, fair": Recipe(SwapScheduler("dpmpp_2m"), num_inference_steps=10)}
OPTIONS: dict[str, Any] = {"num_inference_steps": 25, "guidance_scale": 3.0}


def main(
    out: Annotated[Path, typer.Option(help="folder for recipes.json")] = Path("benchmarks/results/recipes"),
    repeats: Annotated[int, typer.Option(min=3, help="pairs of calls a recipe")] = 20,
    count: Annotated[int, typer.Option(min=1, help="pictures compared a recipe")] = 16,
    only: Annotated[str, typer.Option(help="names, with commas; all if not given")] = "",
) -> None:
    """Ratios with their intervals, and the pictures' distance to the plain ones."""
    torch.set_num_threads(1)
    chosen = [name.strip() for name in only.split(",")] if only else list(RECIPES)
    rows = [measure(name, repeats, count) for name in track(chosen, "recipes")]
    out.mkdir(parents=True, exist_ok=True)
    (out / "recipes.json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    for row in rows:
        typer.echo(f"{row['recipe']:24s} {row['speed']}   psnr {row['psnr']:.1f} dB   ssim {row['ssim']:.4f}")


def measure(name: str, repeats: int, count: int) -> dict[str, Any]:
    both = Beside(RECIPES[name], BASELINES.get(name))
    captions, seeds = drawn("train", count, 0).captions, range(count)
    speed = both.speed(captions[0], 0, repeats)
    return {
        "recipe": name,
        "resolved": str(both.fast.recipe),
        "speed": str(speed),
        "ratio": [speed.ratio, speed.low, speed.high],
        "p50_s": [speed.a.p50_s, speed.b.p50_s],
        **means(both.accelerated(captions, seeds), both.plain(captions, seeds)),
    }


class Beside:
    """emoji-unet plain (or with a baseline), and one of its own weights with a recipe, which may change them."""

    def __init__(self, recipe: Recipe | str, baseline: Recipe | None = None) -> None:
        self.stock, other = (embedded.load("emoji-unet") for _ in range(2))
        for pipe in (self.stock, other):
            pipe.set_progress_bar_config(disable=True)
        self.options = OPTIONS | dict(baseline.defaults if baseline else {})
        if baseline is not None:
            self.stock = AcceleratedPipeline(self.stock, baseline)
        self.fast: Any = AcceleratedPipeline(other, recipe)

    def plain(self, captions: Sequence[str], seeds: Sequence[int]) -> Tensor:
        return generate(self.stock, captions, seeds, **self.options)

    def accelerated(self, captions: Sequence[str], seeds: Sequence[int]) -> Tensor:
        return generate(self.fast, captions, seeds, **OPTIONS | dict(self.fast.recipe.defaults))

    def speed(self, caption: str, seed: int, repeats: int) -> Comparison:
        """One picture a call."""
        return compare(
            lambda: self.plain([caption], [seed]), lambda: self.accelerated([caption], [seed]), repeats=repeats
        )


if __name__ == "__main__":
    typer.run(main)
