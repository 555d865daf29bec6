"""Caches of other libraries beside ours on large denoisers: `python -m fewstep.benchmarks.shape_peers`.

The random models of `shapes`, of at least 200 M parameters. What is timed is a loop of six evaluations with the peer's
own configuration, and with the recipe that `from_peer` makes of it, which computes and reuses at the same steps. How
near the pictures come is measured on models that draw some: `fewstep bench peers`.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from diffusers import FirstBlockCacheConfig, TaylorSeerCacheConfig

from ..accel.cache.convert import ALWAYS, from_peer
from ..accel.denoiser import accelerate, run
from .shapes import RESULTS, SHAPES, Call, Job, Key, completed, count
from .timing import compare, seconds

STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Match:
    """A peer's configuration on a shape; `loop` makes the calls of one generation with the peer on the model."""

    peer: str
    shape: str
    config: Any
    loop: Callable[[Any, Any, dict[str, Any]], Call]


def generation(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """The arguments of each evaluation: time goes down by a tenth."""
    time = inputs["timestep"]
    return [inputs | {"timestep": (time * (1 - i / 10)).to(time.dtype)} for i in range(STEPS)]


def deep_cache(unet: Any, params: dict[str, Any], inputs: dict[str, Any]) -> Call:
    """The helper looks each timestep up in the scheduler's, and wants it as the second argument."""
    from DeepCache import DeepCacheSDHelper

    steps = [dict(step) for step in generation(inputs)]
    first = [(step.pop("sample"), step.pop("timestep")) for step in steps]
    scheduler = SimpleNamespace(timesteps=torch.stack([timestep for _, timestep in first]))
    helper = DeepCacheSDHelper(pipe=SimpleNamespace(unet=unet, scheduler=scheduler))
    helper.set_params(**params)
    helper.enable()
    return lambda: [unet(*two, **rest)[0] for two, rest in zip(first, steps, strict=True)][-1]


def diffusers_hook(transformer: Any, config: Any, inputs: dict[str, Any]) -> Call:
    transformer.enable_cache(config)

    def loop() -> Any:
        transformer._reset_stateful_cache()  # as a pipeline does after its last step
        with transformer.cache_context("cond"):
            return [transformer(**step)[0] for step in generation(inputs)][-1]

    return loop


def ours(model: Any, config: Any, inputs: dict[str, Any]) -> Call:
    accelerate(model, from_peer(config))

    def evaluation(state: Any, step: dict[str, Any]) -> Any:
        found = model(**step)[0]
        state.advance()
        return found

    def loop() -> Any:
        with run() as state:
            return [evaluation(state, step) for step in generation(inputs)][-1]

    return loop


DEEP = {"cache_interval": 3, "cache_branch_id": 0}
TAYLOR: Any = {"cache_interval": 3, "disable_cache_before_step": 1, "max_order": 1, "use_lite_mode": True}
MATCHES = (
    Match(peer="DeepCache 0.1.1", shape="sd15", config=DEEP, loop=deep_cache),
    Match(peer="DeepCache 0.1.1", shape="sdxl", config=DEEP, loop=deep_cache),
    Match(
        peer="diffusers FirstBlockCache",
        shape="flux",
        config=FirstBlockCacheConfig(threshold=ALWAYS),
        loop=diffusers_hook,
    ),
    Match(peer="diffusers TaylorSeer", shape="flux", config=TaylorSeerCacheConfig(**TAYLOR), loop=diffusers_hook),
)


def main(
    out: Annotated[Path, typer.Option(help="folder of peers.json; one that stopped goes on")] = RESULTS,
    batches: Annotated[str, typer.Option(help="images a call, with commas")] = "1,16",
    budget: Annotated[float, typer.Option(min=1, help="seconds for each comparison: two a row")] = 40.0,
) -> None:
    """How many times as fast as plain, and as the peer, our recipe of the peer's configuration is."""
    torch.set_num_threads(1)
    jobs: dict[Key, Job] = {
        (match.shape, match.peer, int(images)): functools.partial(raced, match, int(images), budget)
        for images in batches.split(",")
        for match in MATCHES
    }
    for row in completed(out / "peers.json", ("shape", "peer", "images"), jobs):
        typer.echo(line(row))


@torch.no_grad()
def raced(match: Match, images: int, budget: float) -> dict[str, Any]:
    shape = SHAPES[match.shape]
    torch.manual_seed(0)
    model = shape.model().eval()
    inputs = shape.inputs(shape.rows(images))
    theirs = match.loop(copy.deepcopy(model), match.config, inputs)
    fast = ours(copy.deepcopy(model), match.config, inputs)

    def plain() -> Any:
        return [model(**step) for step in generation(inputs)]

    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "evaluations": STEPS,
        "config": str(match.config),
        "operations": {"ours": count(fast), "peer": count(theirs), "plain": count(plain)},
        "to_plain": ratio(plain, fast, budget),
        "to_peer": ratio(theirs, fast, budget),
    }


def ratio(a: Call, b: Call, budget: float) -> dict[str, Any]:
    """How many times as fast `b` is, in as many pairs as `budget` seconds allow: 5 to 50."""
    pairs = int(min(max(budget / (seconds(a) + seconds(b)), 5), 50))
    found = compare(a, b, repeats=pairs, warm_up=0)
    times = {"p50_s": [found.a.p50_s, found.b.p50_s], "pairs": pairs}
    return times | {"ratio": found.ratio, "low": found.low, "high": found.high}


def line(row: dict[str, Any]) -> str:
    plain, peer = ("{ratio:.2f} ({low:.2f}..{high:.2f})".format(**row[to]) for to in ("to_plain", "to_peer"))
    return f"{row['shape']:5s} {row['images']:3d}  {plain} times as fast as plain, {peer} as {row['peer']}"


if __name__ == "__main__":
    typer.run(main)
