"""Caches of other libraries, and ours that stand against them: over their main knob, each on a fresh pipeline.

A peer is used as its own documentation says, with the settings in which it does best here: DeepCache and DBCache after
no more warm-up than ours have, TaylorSeer in its lite mode (its default matches no layer of CogView4 and changes
nothing).
"""

import functools
import io
import json
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..accel.cache.attention import MIDDLE, AttentionBroadcast
from ..accel.cache.deep import DeepCache
from ..accel.cache.first_block import FirstBlockCache
from ..accel.cache.forecast import Forecast
from ..accel.cache.modulated import TeaCache
from ..accel.policy import Every
from ..accel.recipe import Recipe

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
FEW = (0.1, 0.2, 0.3)
INTERVALS = (2, 3, 4, 5, 6)
FITTED = Path(__file__).parent / "data" / "fitted"


@dataclass(frozen=True)
class Peer:
    """`on`: "unet" or "transformer". `enable(pipe, value, steps)` switches it on for calls of so many steps; what it
    raises becomes a row."""

    on: str
    values: Sequence[Any]
    enable: Callable[[Any, Any, int], Any]


@dataclass(frozen=True)
class Ours:
    """Recipes over our knob for a model and its number of steps, and the peers that they replace, if there are any."""

    on: str
    recipes: Callable[[str, int], Sequence[Recipe]]
    against: tuple[str, ...]


def deep_cache(pipe: Any, value: tuple[int, int], steps: int) -> Any:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=value[0], cache_branch_id=value[1])
    helper.enable()
    return helper


def diffusers_hook(name: str, pipe: Any, settings: dict[str, Any], steps: int) -> None:
    import diffusers

    pipe.transformer.enable_cache(getattr(diffusers, name)(**settings))


def timed_hook(name: str, pipe: Any, settings: dict[str, Any], steps: int) -> None:
    """Those of diffusers that ask the pipeline where it is."""
    diffusers_hook(name, pipe, settings | {"current_timestep_callback": lambda: pipe.current_timestep}, steps)


def mag_cache(pipe: Any, settings: dict[str, Any], steps: int) -> None:
    """Its ratios belong to a model and a number of steps: a run on one caption prints those of each guidance branch."""
    import diffusers

    caption, printed = (FITTED / "captions.txt").read_text().splitlines()[0], io.StringIO()
    kind: Any = diffusers.MagCacheConfig
    pipe.transformer.enable_cache(kind(calibrate=True, num_inference_steps=steps))
    with redirect_stdout(printed):
        pipe(caption, num_inference_steps=steps, output_type="latent")
    pipe.transformer.disable_cache()
    ratios = next(json.loads(line) for line in printed.getvalue().splitlines() if line.startswith("[1.0"))
    pipe.transformer.enable_cache(kind(mag_ratios=ratios, num_inference_steps=steps, **settings))


def dual_block(order: int, pipe: Any, threshold: float, steps: int) -> None:
    import cache_dit

    kind: Any = cache_dit.DBCacheConfig
    config = kind(Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=threshold)
    calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
    cache_dit.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)


def fitted(model: str, steps: int) -> list[Recipe]:
    """What `fewstep fit steps` found for this model and number of steps, on captions that no race draws."""
    return [Recipe.load(path) for path in sorted((FITTED / model).glob(f"*-of-{steps}.json"))]


def each(name: str, values: Sequence[Any]) -> tuple[dict[str, Any], ...]:
    return tuple({name: value} for value in values)


TAYLOR = tuple(
    {"cache_interval": n, "max_order": order, "disable_cache_before_step": 2, "use_lite_mode": True}
    for order in (1, 2)
    for n in INTERVALS
)
PAB = tuple(
    {"spatial_attention_block_skip_range": n, "spatial_attention_timestep_skip_range": (100, 950)} for n in (2, 3, 4)
)
FASTER = tuple(
    {
        "spatial_attention_block_skip_range": n,
        "spatial_attention_timestep_skip_range": (-1, 950),
        "unconditional_batch_skip_range": 1,
        "attention_weight_callback": lambda _: 0.3,
    }
    for n in (2, 3)
)
MAG = tuple(
    {"threshold": threshold, "max_skip_steps": 5, "retention_ratio": ratio}
    for ratio in (0.2, 0.08)
    for threshold in (0.03, 0.06, 0.12, 0.25, 0.5)
)
PEERS: dict[str, Peer] = {
    "DeepCache 0.1.1": Peer("unet", [(n, branch) for branch in (0, 1, 2) for n in INTERVALS], deep_cache),
    "diffusers FirstBlockCache": Peer(
        "transformer", each("threshold", THRESHOLDS), functools.partial(diffusers_hook, "FirstBlockCacheConfig")
    ),
    "cache-dit DBCache": Peer("transformer", THRESHOLDS, functools.partial(dual_block, 0)),
    "diffusers TaylorSeer": Peer("transformer", TAYLOR, functools.partial(diffusers_hook, "TaylorSeerCacheConfig")),
    "diffusers MagCache": Peer("transformer", MAG, mag_cache),
    "cache-dit DBCache TaylorSeer": Peer("transformer", THRESHOLDS, functools.partial(dual_block, 1)),
    "diffusers PAB": Peer("transformer", PAB, functools.partial(timed_hook, "PyramidAttentionBroadcastConfig")),
    "diffusers FasterCache": Peer("transformer", FASTER, functools.partial(timed_hook, "FasterCacheConfig")),
}

OURS: dict[str, Ours] = {
    "DeepCache": Ours(
        "unet",
        lambda model, steps: [Recipe(DeepCache(when=Every(n), depth=depth)) for depth in (0, 1, 2) for n in INTERVALS],
        ("DeepCache 0.1.1",),
    ),
    "Forecast, UNet": Ours(
        "unet",
        lambda model, steps: [
            Recipe(Forecast(when=Every(n), order=o, depth=d)) for d in (0, 1) for o in (1, 2) for n in INTERVALS
        ],
        ("DeepCache 0.1.1",),
    ),
    "Forecast at fitted steps, UNet": Ours("unet", fitted, ("DeepCache 0.1.1",)),
    "FirstBlockCache, UNet": Ours(
        "unet", lambda model, steps: [Recipe(FirstBlockCache(threshold=t, max_consecutive=99)) for t in FEW], ()
    ),
    "TeaCache, UNet": Ours(
        "unet", lambda model, steps: [Recipe(TeaCache(threshold=t, max_consecutive=99)) for t in FEW], ()
    ),
    "AttentionBroadcast, UNet": Ours(
        "unet", lambda model, steps: [Recipe(AttentionBroadcast(cross=Every(n) & MIDDLE)) for n in (3, 6)], ()
    ),
    "FirstBlockCache": Ours(
        "transformer",
        lambda model, steps: [Recipe(FirstBlockCache(threshold=t, max_consecutive=99)) for t in THRESHOLDS],
        ("diffusers FirstBlockCache", "cache-dit DBCache"),
    ),
    "Forecast": Ours(
        "transformer",
        lambda model, steps: [Recipe(Forecast(when=Every(n), damping=d)) for d in (0.0, 0.5) for n in INTERVALS],
        ("diffusers TaylorSeer", "cache-dit DBCache TaylorSeer"),
    ),
    "Forecast at fitted steps": Ours(
        "transformer", fitted, ("diffusers MagCache", "diffusers TaylorSeer", "cache-dit DBCache TaylorSeer")
    ),
    "TeaCache": Ours(
        "transformer",
        lambda model, steps: [Recipe(TeaCache(threshold=t, max_consecutive=99)) for t in THRESHOLDS],
        ("diffusers FirstBlockCache", "cache-dit DBCache"),
    ),
    "AttentionBroadcast": Ours(
        "transformer",
        lambda model, steps: [Recipe(AttentionBroadcast(spatial=Every(n))) for n in (2, 3, 4)],
        ("diffusers PAB", "diffusers FasterCache"),
    ),
}
