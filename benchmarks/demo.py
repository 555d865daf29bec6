"""`fewstep demo`: the embedded model on a handful of captions, plain beside accelerated."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..accel.pipeline import AcceleratedPipeline
from ..accel.recipe import Recipe
from ..accel.zoo import embedded
from .metrics.paired import psnr, ssim
from .prompts import drawn
from .report import grid
from .timing import Comparison, compare, machine

PLAIN_STEPS, GUIDANCE = 25, 3.0


def run(out: Path, recipe: str, count: int, seed: int, as_json: bool) -> None:
    """Writes demo.png (one row plain, one row accelerated, same seeds) and table.json; prints the table."""
    console = Console(quiet=as_json)
    torch.set_num_threads(1)
    pipe = embedded.load("emoji-unet")
    pipe.set_progress_bar_config(disable=True)
    captions = drawn("train", count, seed).captions
    console.print(f"emoji-unet on {count} captions: " + "; ".join(captions))
    plain = AcceleratedPipeline(pipe, Recipe(num_inference_steps=PLAIN_STEPS))
    fast = AcceleratedPipeline(pipe, recipe)
    console.print(fast.explain())
    with console.status("pictures"):
        pictures = [pipe_call(p, captions, seed) for p in (plain, fast)]
    with console.status("timing, interleaved, one picture a call"):
        timed = compare(lambda: pipe_call(plain, captions[:1], seed), lambda: pipe_call(fast, captions[:1], seed), repeats=10)
    out.mkdir(parents=True, exist_ok=True)
    grid(pictures, [f"plain\n{PLAIN_STEPS} steps\n{timed.a.p50_s:.3f} s", label(recipe, timed)]).save(out / "demo.png")
    row = figures(pictures, timed) | {"recipe": fast.recipe.to_dict(), "captions": captions, "machine": machine()}
    (out / "table.json").write_text(json.dumps(row, indent=1) + "\n")
    show(row, timed, recipe, console)
    print(json.dumps(row) if as_json else f"{out / 'demo.png'} and {out / 'table.json'}")


def pipe_call(pipe: Any, captions: list[str], seed: int) -> torch.Tensor:
    generators = [torch.Generator("cpu").manual_seed(seed + i) for i in range(len(captions))]
    return pipe(captions, guidance_scale=GUIDANCE, generator=generators, output_type="pt").images.float()


def label(recipe: str, timed: Comparison) -> str:
    return f"{recipe}\n{timed.b.p50_s:.3f} s\n{timed.ratio:.2f} times as fast"


def figures(pictures: list[torch.Tensor], timed: Comparison) -> dict[str, Any]:
    plain, fast = (p.clamp(0, 1) for p in pictures)
    return {
        "plain_s_p50": timed.a.p50_s,
        "fast_s_p50": timed.b.p50_s,
        "speedup": timed.ratio,
        "speedup_low": timed.low,
        "speedup_high": timed.high,
        "psnr": psnr(fast, plain).clamp(max=100).mean().item(),
        "ssim": ssim(fast, plain).mean().item(),
        "psnr_floor": psnr(plain.roll(1, 0), plain).mean().item(),
    }


def show(row: dict[str, Any], timed: Comparison, recipe: str, console: Console) -> None:
    from rich.table import Table

    table = Table("", "seconds a picture", "times as fast (95 %)", "PSNR to plain", "SSIM")
    table.add_row("plain", f"{timed.a.p50_s:.3f}", "1", "", "")
    speed = f"{timed.ratio:.2f} ({timed.low:.2f}..{timed.high:.2f})"
    table.add_row(recipe, f"{timed.b.p50_s:.3f}", speed, f"{row['psnr']:.1f} dB", f"{row['ssim']:.3f}")
    table.add_row("floor: another caption's picture", "", "", f"{row['psnr_floor']:.1f} dB", "", style="dim")
    console.print(table)
