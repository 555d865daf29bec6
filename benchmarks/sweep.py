"""Quality and speed of every combination of scheduler, steps, guidance and recipe, resumable where it stopped.

Each setting is a row: pictures of the same prompts from the same seeds, compared with the reference setting's pictures
(the most steps of the first scheduler, no recipe), and latency in one process, interleaved with the reference.
"""

import copy
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import avg_pool2d

from ..accel import catalog
from ..accel.errors import InvalidConfig, Unsupported
from ..accel.pipeline import AcceleratedPipeline, resolve
from ..accel.recipe import Recipe
from ..accel.solver import SwapScheduler
from .cost import multiply_adds
from .pictures import arguments, generate
from .prompts import Prompts
from .quality import Quality
from .report import grid
from .timing import compare, machine

SHOWN = 8  # pictures of each setting in the report
OWN = "own"  # the scheduler that the pipeline comes with


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One point of the sweep. `scheduler`: a name, or own. `recipe`: plain, a preset, a recipe.json, or a technique's
    setting as `points` names it."""

    scheduler: str
    steps: int
    guidance: float
    recipe: str = "plain"

    @property
    def key(self) -> str:
        return f"{self.recipe} / {self.scheduler} / {self.steps} / {self.guidance:g}"

    @property
    def options(self) -> dict[str, Any]:
        """As a pipeline takes them."""
        return {"num_inference_steps": self.steps, "guidance_scale": self.guidance}


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """What is varied, and `repeats` timed calls a setting. Picture k starts from `seed` + k."""

    schedulers: tuple[str, ...]
    steps: tuple[int, ...]
    guidance: tuple[float, ...] = (3.0,)
    recipes: tuple[str, ...] = ("plain",)
    repeats: int = 5
    batch_size: int = 20
    seed: int = 0

    def settings(self) -> list[Setting]:
        axes = product(self.recipes, self.schedulers, self.steps, self.guidance)
        return [Setting(recipe=r, scheduler=s, steps=n, guidance=g) for r, s, n, g in axes]

    @property
    def reference(self) -> Setting:
        return Setting(scheduler=self.schedulers[0], steps=max(self.steps), guidance=self.guidance[0])


def points(technique: str) -> dict[str, Recipe]:
    """Every setting in the `space()` of a technique of the catalog, by its name in the table."""
    example = catalog.example(technique)
    space = example.space()
    settings = [replace(example, **dict(zip(space, values, strict=True))) for values in product(*space.values())]
    return {str(setting): Recipe(setting) for setting in settings}


def spread(names: Sequence[str]) -> tuple[str, ...]:
    """The names with every technique of the catalog in place of its own spread over its space."""
    return tuple(point for name in names for point in (points(name) if name in catalog.TECHNIQUES else (name,)))


def recipe_of(name: str, pipe: Any) -> Recipe:
    """Of a name in the sweep. Raises InvalidRecipe for one that nobody knows."""
    for technique in catalog.TECHNIQUES:
        if name.startswith(catalog.technique(technique).__name__ + "("):
            return points(technique)[name]
    return Recipe() if name == "plain" else resolve(name, pipe)


class Sweep:
    """Runs the settings that `out` does not hold yet; every finished row is on disk before the next begins.

    Raises InvalidRecipe for a recipe or scheduler that nobody knows, InvalidConfig where `out` holds another sweep.
    """

    def __init__(self, pipe: Any, prompts: Prompts, config: SweepConfig, out: Path) -> None:
        self.pipe, self.prompts, self.config, self.out = pipe, prompts, config, out
        self.recipes = {name: recipe_of(name, pipe) for name in config.recipes}
        self.schedulers = {name: () if name == OWN else (SwapScheduler(name),) for name in config.schedulers}
        self.seeds = [config.seed + i for i in range(len(prompts.captions))]
        self.file = out / "rows.jsonl"
        (out / "pictures").mkdir(parents=True, exist_ok=True)
        self.refuse_other(out / "sweep.json")

    def refuse_other(self, file: Path) -> None:
        """Rows against another reference, or of other pictures, do not compare with this one's."""
        wanted = {
            "model": Path(self.pipe.config.get("_name_or_path") or type(self.pipe).__name__).name,
            "reference": asdict(self.config.reference),
            "seed": self.config.seed,
            "captions": self.prompts.captions,
        }
        before = json.loads(file.read_text()) if file.exists() else wanted
        different = [name for name in wanted if before.get(name) != wanted[name]]
        if different:
            raise InvalidConfig(
                f"{self.out} holds a sweep of another {', '.join(different)}: change --out, or give the same options"
            )
        file.write_text(json.dumps(wanted, indent=1) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def run(self, progress: Callable[[Sequence[Setting]], Iterator[Setting]]) -> list[dict[str, Any]]:
        """All rows, old and new; a setting that a technique refuses is a row with the reason."""
        done = {row["key"] for row in self.rows()}
        missing = [s for s in self.config.settings() if s.key not in done]
        if missing:
            # A recipe may change the weights that it works on, so the reference beside it has its own.
            shared = all(not recipe.techniques for recipe in self.recipes.values())
            stock = self.pipe if shared else copy.deepcopy(self.pipe)
            with self.attached(stock, self.config.reference) as plain:
                quality = self.against(plain)
                for setting in progress(missing):
                    self.keep(self.measure(setting, plain, quality))
        return self.rows()

    @contextmanager
    def attached(self, pipe: Any, setting: Setting) -> Generator[Any]:
        """`pipe` with the setting's scheduler and the rest of its recipe; the plain pipeline again afterwards."""
        recipe = self.recipes.get(setting.recipe, Recipe())
        rest = [t for t in recipe.techniques if not isinstance(t, SwapScheduler)]
        fast: Any = AcceleratedPipeline(pipe, Recipe(*self.schedulers[setting.scheduler], *rest, **recipe.defaults))
        try:
            yield fast
        finally:
            fast.detach()

    def against(self, plain: Any) -> Quality:
        """The reference's pictures, and those of other seeds: the floor of every figure."""
        again = [seed + 1_000_000 for seed in self.seeds]
        pictures = [self.pictures(plain, self.config.reference, seeds) for seeds in (self.seeds, again)]
        return Quality(self.prompts, *pictures)

    def pictures(self, pipe: Any, setting: Setting, seeds: Sequence[int]) -> Tensor:
        return generate(pipe, self.prompts.captions, seeds, batch_size=self.config.batch_size, **setting.options)

    def measure(self, setting: Setting, plain: Any, quality: Quality) -> dict[str, Any]:
        row: dict[str, Any] = {"key": setting.key, **asdict(setting), "machine": machine()}
        try:
            with self.attached(self.pipe, setting) as fast:
                images = self.pictures(fast, setting, self.seeds)
                figures = quality.of(images) | self.cost(fast, setting) | self.latency(plain, fast, setting)
        except Unsupported as refusal:
            return row | {"refused": str(refusal)}
        return row | {"resolved": str(fast.recipe)} | figures | {"pictures": self.show(setting, images[:SHOWN])}

    def cost(self, fast: Any, setting: Setting) -> dict[str, Any]:
        """Of one picture, when what a technique compiles or remembers is there."""
        one = self.one(fast, setting)
        report = one().report
        return {"nfe": report.nfe, "multiply_adds": multiply_adds(one), "peak_bytes": report.peak_bytes}

    def latency(self, plain: Any, fast: Any, setting: Setting) -> dict[str, Any]:
        """One picture, batch of one, interleaved with the reference setting on the plain pipeline."""
        reference = self.one(plain, self.config.reference)
        timed = compare(reference, self.one(fast, setting), repeats=self.config.repeats)
        return {
            "latency_s_p50": timed.b.p50_s,
            "latency_s_p90": timed.b.p90_s,
            "speedup": timed.ratio,
            "speedup_low": timed.low,
            "speedup_high": timed.high,
        }

    def one(self, fast: Any, setting: Setting) -> Callable[[], Any]:
        """A call for the first picture alone."""
        return lambda: fast.run(**arguments(self.prompts.captions[:1], self.seeds[:1], **setting.options))

    def show(self, setting: Setting, images: Tensor) -> str:
        """Keeps a row of small pictures for the report; where, seen from `out`."""
        small = avg_pool2d(images, max(1, max(images.shape[-2:]) // 128))
        place = f"pictures/{re.sub(r'[^A-Za-z0-9.]+', '-', setting.key)}.png"
        grid([small], [setting.key.replace(" / ", "\n")]).save(self.out / place)
        return place

    def keep(self, row: dict[str, Any]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
