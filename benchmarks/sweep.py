"""Quality and speed of every combination of scheduler, steps, guidance and recipe, resumable where it stopped.

Each setting is a row: pictures of the same prompts from the same seeds, compared with the reference setting's pictures
(the most steps of the first scheduler, no recipe), and latency in one process, interleaved with the reference.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accel.errors import InvalidConfig, Unsupported
from ..accel.pipeline import AcceleratedPipeline, resolve
from ..accel.recipe import Recipe
from ..accel.solver import SwapScheduler
from .cost import multiply_adds
from .prompts import Prompts
from .quality import Quality
from .timing import compare, machine


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the sweep. `recipe`: plain, a preset's name, or a recipe.json."""

    scheduler: str
    steps: int
    guidance: float
    recipe: str = "plain"

    @property
    def key(self) -> str:
        return f"{self.recipe} / {self.scheduler} / {self.steps} / {self.guidance:g}"


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What is varied, and how much is measured: `count` pictures a setting, `repeats` timed calls of one picture."""

    schedulers: tuple[str, ...]
    steps: tuple[int, ...]
    guidance: tuple[float, ...] = (3.0,)
    recipes: tuple[str, ...] = ("plain",)
    count: int = 100
    repeats: int = 5
    batch_size: int = 20
    seed: int = 0

    def settings(self) -> list[Setting]:
        axes = itertools.product(self.recipes, self.schedulers, self.steps, self.guidance)
        return [Setting(recipe=r, scheduler=s, steps=n, guidance=g) for r, s, n, g in axes]

    @property
    def reference(self) -> Setting:
        return Setting(scheduler=self.schedulers[0], steps=max(self.steps), guidance=self.guidance[0])


class Sweep:
    """Runs the settings that `out` does not hold yet; every finished row is on disk before the next begins."""

    def __init__(self, pipe: Any, prompts: Prompts, config: SweepConfig, out: Path) -> None:
        self.pipe, self.prompts, self.config, self.out = pipe, prompts, config, out
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "rows.jsonl"
        self.refuse_other(out / "sweep.json")
        self.seeds = [config.seed + i for i in range(len(prompts.captions))]

    def refuse_other(self, file: Path) -> None:
        """Rows of another sweep do not compare with this one's."""
        wanted = asdict(self.config) | {"model": str(self.pipe.config.get("_name_or_path", "")), "captions": self.prompts.captions}
        same = ("count", "seed", "captions")
        if file.exists():
            before = json.loads(file.read_text())
            if any(before.get(k) != json.loads(json.dumps(wanted))[k] for k in same):
                raise InvalidConfig(f"{self.out} holds a sweep of other prompts, count or seed: give another --out")
        file.write_text(json.dumps(wanted, indent=1))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def run(self, progress: Callable[[Sequence[Setting]], Iterator[Setting]]) -> list[dict[str, Any]]:
        """All rows, old and new; a setting that a technique refuses is a row with the reason."""
        done = {row["key"] for row in self.rows()}
        missing = [s for s in self.config.settings() if s.key not in done]
        if missing:
            self.reference = self.pictures(self.config.reference, self.seeds)
            self.quality = Quality(self.prompts, self.reference, self.pictures(self.config.reference, self.again()))
            for setting in progress(missing):
                self.keep(self.measure(setting))
        return self.rows()

    def again(self) -> list[int]:
        """Other seeds for the same prompts: the floor of every figure."""
        return [seed + 1_000_000 for seed in self.seeds]

    def keep(self, row: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def measure(self, setting: Setting) -> dict[str, Any]:
        row: dict[str, Any] = {"key": setting.key, **asdict(setting), "machine": machine()}
        try:
            fast = self.accelerated(setting)
        except Unsupported as refusal:
            return row | {"refused": str(refusal)}
        try:
            images = generate(fast, setting, self.prompts.captions, self.seeds, self.config.batch_size)
            row |= self.quality.of(images) | self.cost(fast, setting)
        finally:
            fast.attachment.detach()
        return row | self.latency(setting)

    def accelerated(self, setting: Setting) -> Any:
        recipe = Recipe() if setting.recipe == "plain" else resolve(setting.recipe, self.pipe)
        kept = [t for t in recipe.techniques if not isinstance(t, SwapScheduler)]
        return AcceleratedPipeline(self.pipe, Recipe(SwapScheduler(setting.scheduler), *kept))

    def pictures(self, setting: Setting, seeds: Sequence[int]) -> Tensor:
        fast = self.accelerated(setting)
        try:
            return generate(fast, setting, self.prompts.captions, seeds, self.config.batch_size)
        finally:
            fast.attachment.detach()

    def cost(self, fast: Any, setting: Setting) -> dict[str, Any]:
        def one() -> Any:
            return call(fast, setting, self.prompts.captions[:1], self.seeds[:1])

        report = fast.run(**arguments(setting, self.prompts.captions[:1], self.seeds[:1])).report
        return {"nfe": report.nfe, "multiply_adds": multiply_adds(one), "peak_bytes": report.peak_bytes}

    def latency(self, setting: Setting) -> dict[str, Any]:
        """One picture, batch of one, interleaved with the reference setting on the plain pipeline."""
        timed = compare(self.one(self.config.reference), self.one(setting), repeats=self.config.repeats)
        return {
            "latency_s_p50": timed.b.p50_s,
            "latency_s_p90": timed.b.p90_s,
            "speedup": timed.ratio,
            "speedup_low": timed.low,
            "speedup_high": timed.high,
        }

    def one(self, setting: Setting) -> Callable[[], Any]:
        """A call that attaches nothing while it is timed; two attachments may share the denoiser."""
        fast = self.accelerated(setting)
        return lambda: call(fast, setting, self.prompts.captions[:1], self.seeds[:1])


def arguments(setting: Setting, captions: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    steps = {"num_inference_steps": setting.steps, "guidance_scale": setting.guidance}
    return {"prompt": list(captions), "generator": generators, "output_type": "pt", **steps}


def call(pipe: Any, setting: Setting, captions: Sequence[str], seeds: Sequence[int]) -> Tensor:
    return pipe(**arguments(setting, captions, seeds)).images


def generate(pipe: Any, setting: Setting, captions: Sequence[str], seeds: Sequence[int], batch_size: int) -> Tensor:
    """(N, 3, H, W) in 0..1, float32 on the CPU."""
    places = range(0, len(captions), batch_size)
    parts = [call(pipe, setting, captions[i : i + batch_size], seeds[i : i + batch_size]) for i in places]
    return torch.cat(parts).float().cpu().clamp(0, 1)
