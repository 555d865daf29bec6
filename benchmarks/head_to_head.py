"""Ours against the caches of other libraries on the same work: `fewstep bench peers`.

Every point is one setting of one contender: speed interleaved with the plain pipeline in one process, and the distance
of its pictures to the plain ones of the same seeds. Contenders are compared at equal PSNR, on the curves that their
best settings make; a setting that raises is a row with the error.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accel.pipeline import AcceleratedPipeline
from ..accel.zoo import embedded
from .metrics.distribution import mmd2
from .metrics.features import extract
from .metrics.paired import means
from .metrics.perceptual import perceptual
from .peers import OURS, PEERS, Peer
from .pictures import generate
from .prompts import drawn
from .race_plot import curves
from .timing import compare, machine

PLAIN = "plain beside itself"


@dataclass(frozen=True, kw_only=True)
class Race:
    """What every contender runs: `count` captions for quality, the first of them, alone, for speed."""

    model: str
    steps: int = 25
    guidance: float = 3.0
    count: int = 32
    repeats: int = 9
    precision: str = "fp32"

    @property
    def options(self) -> dict[str, Any]:
        return {"num_inference_steps": self.steps, "guidance_scale": self.guidance}

    def load(self) -> Any:
        """A fresh pipeline: some peers cannot be switched off again."""
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]
        pipe = embedded.load(self.model, torch_dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
        return pipe


@dataclass(frozen=True, kw_only=True)
class Point:
    """`speed`: times as fast as plain, between `low` and `high` with 95 % confidence."""

    contender: str
    setting: str
    ours: bool
    psnr: float = math.nan
    perceptual: float = math.nan
    kid: float = math.nan
    speed: float = math.nan
    low: float = math.nan
    high: float = math.nan
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.contender} {self.setting}"

    @property
    def spread(self) -> float:
        """Half the interval, of the logarithm of the speed."""
        return math.log(self.high / self.low) / 2


Start = Callable[[], Any]  # makes a pipeline with the contender on


def contenders(race: Race) -> Iterator[tuple[Point, Start]]:
    kind = "unet" if hasattr(race.load(), "unet") else "transformer"
    yield Point(contender=PLAIN, setting="", ours=True), race.load
    for name, ours in OURS.items():
        for recipe in ours.recipes(race.model, race.steps) if ours.on == kind else ():
            blank = Point(contender=name, setting=str(recipe), ours=True)
            yield blank, lambda recipe=recipe: AcceleratedPipeline(race.load(), recipe)
    for name, peer in PEERS.items():
        for value in peer.values if peer.on == kind else ():
            blank = Point(contender=name, setting=setting(value), ours=False)
            yield blank, lambda peer=peer, value=value: enabled(race, peer, value)


def setting(value: Any) -> str:
    shown = value.items() if isinstance(value, dict) else ()
    return ", ".join(f"{k}={v}" for k, v in shown if not callable(v)) or str(value)


def enabled(race: Race, peer: Peer, value: Any) -> Any:
    pipe = race.load()
    peer.enable(pipe, value, race.steps)
    return pipe


class HeadToHead:
    """Measures what `out` does not hold yet; every point is on disk before the next."""

    def __init__(self, race: Race, out: Path) -> None:
        self.race, self.file = race, out / "points.jsonl"
        out.mkdir(parents=True, exist_ok=True)
        self.prompts = drawn("train", race.count, 0)
        self.plain = race.load()
        self.reference = self.pictures(self.plain)
        self.head = extract(self.reference).head.double()

    def pictures(self, pipe: Any) -> Tensor:
        """One a call, as they are timed: a peer that decides for a batch at once makes others of a batch."""
        seeds = range(self.race.count)
        return generate(pipe, self.prompts.captions, seeds, batch_size=1, **self.race.options)

    def points(self) -> list[Point]:
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        return [Point(**json.loads(line)) for line in lines]

    def run(self, progress: Callable[[Sequence[Any]], Iterator[Any]]) -> list[Point]:
        done = {point.key for point in self.points()}
        starts = {blank: start for blank, start in contenders(self.race) if blank.key not in done}
        for blank in progress(list(starts)):
            point = self.measure(blank, starts[blank])
            with self.file.open("a") as file:
                file.write(json.dumps(asdict(point)) + "\n")
        return self.points()

    def measure(self, blank: Point, start: Start) -> Point:
        try:
            pipe = start()
            return replace(blank, **self.quality(self.pictures(pipe)), **self.speed(pipe))
        except Exception as error:  # whatever a peer raises is its result
            return replace(blank, error=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def quality(self, images: Tensor) -> dict[str, float]:
        kid = mmd2(extract(images).head.double(), self.head, paired=True)
        distance = perceptual(images, self.reference).mean().item()
        return {"psnr": means(images, self.reference)["psnr"], "perceptual": distance, "kid": kid}

    def speed(self, pipe: Any) -> dict[str, float]:
        timed = compare(self.one(self.plain), self.one(pipe), repeats=self.race.repeats, warm_up=1)
        return {"speed": timed.ratio, "low": timed.low, "high": timed.high}

    def one(self, pipe: Any) -> Callable[[], Any]:
        return lambda: generate(pipe, self.prompts.captions[:1], [0], **self.race.options)


# ---------------------------------------------------------------------------------------------------- comparison


def front(points: Sequence[Point]) -> list[Point]:
    """The settings that no other beats in both, slowest (and nearest to plain) first."""
    usable = [p for p in points if not math.isnan(p.psnr) and p.contender != PLAIN]
    best = [p for p in usable if not any(beats(q, p) for q in usable)]
    return sorted(best, key=lambda p: (-p.psnr, p.speed))


def beats(one: Point, other: Point) -> bool:
    """As good in both, better in one."""
    better = (one.psnr > other.psnr, one.speed > other.speed)
    return any(better) and one.psnr >= other.psnr and one.speed >= other.speed


def at(curve: Sequence[Point], psnr: float) -> tuple[float, float] | None:
    """Logarithm of the speed at that PSNR, and its half interval, between two settings; None outside of them."""
    for better, worse in pairwise(curve):
        if better.psnr >= psnr >= worse.psnr:
            share = (better.psnr - psnr) / ((better.psnr - worse.psnr) or 1.0)
            log = (1 - share) * math.log(better.speed) + share * math.log(worse.speed)
            return log, max(better.spread, worse.spread)
    return None


def ratios(ours: Sequence[Point], theirs: Sequence[Point]) -> list[dict[str, float]]:
    """How many times as fast ours is as theirs at the PSNR of each setting on their front."""
    found: list[dict[str, float]] = []
    for point in front(theirs):
        mine = at(front(ours), point.psnr)
        if mine is not None:
            ratio, half = mine[0] - math.log(point.speed), math.hypot(mine[1], point.spread)
            bounds = {"low": math.exp(ratio - half), "high": math.exp(ratio + half)}
            found.append({"psnr": point.psnr, "ratio": math.exp(ratio), **bounds})
    return found


def summary(points: Sequence[Point]) -> dict[str, list[dict[str, float]]]:
    """Each of ours against each peer that it replaces, and the best of ours against the best of theirs."""
    of = {name: [p for p in points if p.contender == name] for name in {p.contender for p in points}}
    pairs = {f"{n} / {peer}": (of[n], of[peer]) for n, o in OURS.items() if n in of for peer in o.against if peer in of}
    pairs["best / best"] = ([p for p in points if p.ours], [p for p in points if not p.ours])
    return {name: ratios(*pair) for name, pair in pairs.items()}


def write(points: Sequence[Point], race: Race, out: Path) -> dict[str, Any]:
    """`out`/points.csv, summary.json and curves.svg."""
    with (out / "points.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, [*asdict(points[0])])
        rows.writeheader()
        rows.writerows(asdict(p) for p in points)
    found = {"race": asdict(race), "machine": machine(), "ours_to_peer_at_equal_psnr": summary(points)}
    (out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    names = dict.fromkeys(p.contender for p in points)
    (out / "curves.svg").write_text(curves({n: front([p for p in points if p.contender == n]) for n in names}))
    return found
