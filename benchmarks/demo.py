"""`fewstep demo`: the embedded model on a handful of captions, plain beside accelerated."""

import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .metrics.paired import means
from .prompts import drawn
from .recipes import OPTIONS, Beside
from .report import grid
from .timing import machine


def run(out: Path, recipe: str, count: int, seed: int, as_json: bool) -> None:
    """Writes demo.png (one row plain, one row accelerated, same seeds) and table.json; prints the table."""
    console = Console(quiet=as_json)
    torch.set_num_threads(1)
    both = Beside(recipe)
    captions, seeds = drawn("train", count, seed).captions, range(seed, seed + count)
    console.print(f"emoji-unet on {count} captions: " + "; ".join(captions))
    console.print(both.fast.explain())
    with console.status("pictures"):
        plain, fast = both.plain(captions, seeds), both.accelerated(captions, seeds)
        again = both.plain(captions, range(seed + 1_000_000, seed + 1_000_000 + count))
    with console.status("timing, interleaved, one picture a call"):
        timed = both.speed(captions[0], seed, repeats=10)
    row: dict[str, Any] = {
        "plain_s_p50": timed.a.p50_s,
        "fast_s_p50": timed.b.p50_s,
        "speedup": timed.ratio,
        "speedup_low": timed.low,
        "speedup_high": timed.high,
        **means(fast, plain),
        **{f"{name}_floor": value for name, value in means(again, plain).items()},
    }
    row |= {"recipe": both.fast.recipe.to_dict(), "captions": captions, "machine": machine()}
    out.mkdir(parents=True, exist_ok=True)
    labels = [
        f"plain\n{OPTIONS['num_inference_steps']} steps\n{timed.a.p50_s:.3f} s",
        f"{Path(recipe).name}\n{timed.b.p50_s:.3f} s\n{timed.ratio:.2f} times as fast",
    ]
    grid([plain, fast], labels).save(out / "demo.png")
    (out / "table.json").write_text(json.dumps(row, indent=1) + "\n")
    console.print(table(row, recipe))
    print(json.dumps(row) if as_json else f"{out / 'demo.png'} and {out / 'table.json'}")


def table(row: dict[str, Any], recipe: str) -> Table:
    found = Table("", "seconds a picture", "times as fast (95 %)", "PSNR to plain", "SSIM")
    found.add_row("plain", f"{row['plain_s_p50']:.3f}", "1", "", "")
    speed = f"{row['speedup']:.2f} ({row['speedup_low']:.2f}..{row['speedup_high']:.2f})"
    found.add_row(recipe, f"{row['fast_s_p50']:.3f}", speed, f"{row['psnr']:.1f} dB", f"{row['ssim']:.3f}")
    floor = (f"{row['psnr_floor']:.1f} dB", f"{row['ssim_floor']:.3f}")
    found.add_row("floor: plain under other seeds", "", "", *floor, style="dim")
    return found
