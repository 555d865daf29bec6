"""Each technique and preset against the plain pipeline on emoji-unet: `python -m fewstep.benchmarks.recipes`.

Interleaved, one thread, one picture a call, the same steps; pictures of the same seeds say what it cost.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from ..accel.cache.cross_attention import CrossAttentionCache
from ..accel.cache.text import TextCache
from ..accel.kernels.compile import CompileBlocks
from ..accel.kernels.memory_format import ChannelsLast
from ..accel.kernels.precision import Bfloat16
from ..accel.pipeline import AcceleratedPipeline, resolve
from ..accel.recipe import Recipe
from ..accel.zoo import embedded
from .metrics.paired import psnr, ssim
from .prompts import drawn
from .timing import compare, machine

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
}
STEPS, GUIDANCE = 25, 3.0


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
    """A stock pipeline with no attachment at all, beside one of its own weights with the recipe."""
    stock, other = (embedded.load("emoji-unet") for _ in range(2))
    for pipe in (stock, other):
        pipe.set_progress_bar_config(disable=True)
    recipe = RECIPES[name]
    fast = AcceleratedPipeline(other, resolve(recipe, other) if isinstance(recipe, str) else recipe)
    prompts = drawn("train", count, 0).captions
    own = {} if "num_inference_steps" in fast.recipe.defaults else {"num_inference_steps": STEPS}
    speed = compare(
        lambda: call(stock, prompts[:1], num_inference_steps=STEPS),
        lambda: call(fast, prompts[:1], **own),
        repeats=repeats,
    )
    plain, found = call(stock, prompts, num_inference_steps=STEPS), call(fast, prompts, **own)
    return {
        "recipe": name,
        "resolved": str(fast.recipe),
        "speed": str(speed),
        "ratio": [speed.ratio, speed.low, speed.high],
        "p50_s": [speed.a.p50_s, speed.b.p50_s],
        "psnr": psnr(found, plain).clamp(max=100).mean().item(),
        "ssim": ssim(found, plain).mean().item(),
    }


def call(pipe: Any, prompts: list[str], **options: Any) -> torch.Tensor:
    generators = [torch.Generator("cpu").manual_seed(i) for i in range(len(prompts))]
    images = pipe(prompts, guidance_scale=GUIDANCE, generator=generators, output_type="pt", **options).images
    return images.float().clamp(0, 1)


if __name__ == "__main__":
    typer.run(main)
