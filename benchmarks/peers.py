"""Caches of other libraries, and ours that stand against them: over their main knob, each on a fresh pipeline.

A peer is used as its own documentation says, with the settings in which it does best here: DeepCache and DBCache after
no more warm-up than ours have, TaylorSeer in its lite mode (its default matches no layer of CogView4 and changes
nothing).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..accel.cache.attention import AttentionBroadcast
from ..accel.cache.deep import DeepCache
from ..accel.cache.first_block import FirstBlockCache
from ..accel.cache.forecast import Forecast
from ..accel.cache.modulated import TeaCache
from ..accel.policy import Every, Listed
from ..accel.recipe import Recipe

THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)
INTERVALS = (2, 3, 4, 5, 6)


@dataclass(frozen=True)
class Peer:
    """`on`: "unet" or "transformer". `enable(pipe, value)` switches it on; what it raises becomes a row."""

    on: str
    values: Sequence[Any]
    enable: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Ours:
    """Recipes over our knob for a number of steps, and the peers that they replace."""

    on: str
    recipes: Callable[[int], Sequence[Recipe]]
    against: tuple[str, ...]


def deep_cache(pipe: Any, value: tuple[int, int]) -> Any:
    from DeepCache import DeepCacheSDHelper

    helper = DeepCacheSDHelper(pipe=pipe)
    helper.set_params(cache_interval=value[0], cache_branch_id=value[1])
    helper.enable()
    return helper


def diffusers_hook(name: str, pipe: Any, settings: dict[str, Any]) -> None:
    import diffusers

    pipe.transformer.enable_cache(getattr(diffusers, name)(**settings))


def timed_hook(name: str, pipe: Any, settings: dict[str, Any]) -> None:
    """Those of diffusers that ask the pipeline where it is."""
    diffusers_hook(name, pipe, settings | {"current_timestep_callback": lambda: pipe.current_timestep})


def dual_block(order: int, pipe: Any, threshold: float) -> None:
    import cache_dit

    kind: Any = cache_dit.DBCacheConfig
    config = kind(Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, residual_diff_threshold=threshold)
    calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
    cache_dit.enable_cache(pipe, cache_config=config, calibrator_config=calibrator)


def later(steps: int, computed: int, power: float = 0.8) -> Listed:
    """`computed` evaluations from the first to the last of `steps`, denser towards the end: features move faster there.
    The power was chosen on other captions than those of the race."""
    return Listed(tuple(sorted({round((steps - 1) * (i / (computed - 1)) ** power) for i in range(computed)})))


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
PEERS: dict[str, Peer] = {
    "DeepCache 0.1.1": Peer("unet", [(n, branch) for branch in (0, 1, 2) for n in INTERVALS], deep_cache),
    "diffusers FirstBlockCache": Peer(
        "transformer", each("threshold", THRESHOLDS), functools.partial(diffusers_hook, "FirstBlockCacheConfig")
    ),
    "cache-dit DBCache": Peer("transformer", THRESHOLDS, functools.partial(dual_block, 0)),
    "diffusers TaylorSeer": Peer("transformer", TAYLOR, functools.partial(diffusers_hook, "TaylorSeerCacheConfig")),
    "cache-dit DBCache TaylorSeer": Peer("transformer", THRESHOLDS, functools.partial(dual_block, 1)),
    "diffusers PAB": Peer("transformer", PAB, functools.partial(timed_hook, "PyramidAttentionBroadcastConfig")),
    "diffusers FasterCache": Peer("transformer", FASTER, functools.partial(timed_hook, "FasterCacheConfig")),
}
# MagCache needs a calibration of its own for each model and number of steps: it is converted (accel/cache/convert.py)
# and not raced.

OURS: dict[str, Ours] = {
    "DeepCache": Ours(
        "unet",
        lambda steps: [Recipe(DeepCache(when=Every(n), depth=depth)) for depth in (0, 1, 2) for n in INTERVALS],
        ("DeepCache 0.1.1",),
    ),
    "Forecast, UNet": Ours(
        "unet",
        lambda steps: [
            Recipe(Forecast(when=Every(n), order=o, depth=d)) for d in (0, 1) for o in (1, 2) for n in INTERVALS
        ],
        ("DeepCache 0.1.1",),
    ),
    "Forecast later and later, UNet": Ours(
        "unet",
        lambda steps: [Recipe(Forecast(when=later(steps, k))) for k in (steps // 6, *range(steps // 5, steps // 2, 2))],
        ("DeepCache 0.1.1",),
    ),
    "FirstBlockCache": Ours(
        "transformer",
        lambda steps: [Recipe(FirstBlockCache(threshold=t, max_consecutive=99)) for t in THRESHOLDS],
        ("diffusers FirstBlockCache", "cache-dit DBCache"),
    ),
    "Forecast": Ours(
        "transformer",
        lambda steps: [Recipe(Forecast(when=Every(n), order=order)) for order in (1, 2) for n in INTERVALS],
        ("diffusers TaylorSeer", "cache-dit DBCache TaylorSeer"),
    ),
    "Forecast later and later": Ours(
        "transformer",
        lambda steps: [Recipe(Forecast(when=later(steps, k))) for k in (steps // 6, *range(steps // 5, steps // 2, 2))],
        ("diffusers TaylorSeer", "cache-dit DBCache TaylorSeer"),
    ),
    "TeaCache": Ours(
        "transformer",
        lambda steps: [Recipe(TeaCache(threshold=t, max_consecutive=99)) for t in THRESHOLDS],
        ("diffusers FirstBlockCache", "cache-dit DBCache"),
    ),
    "AttentionBroadcast": Ours(
        "transformer",
        lambda steps: [Recipe(AttentionBroadcast(spatial=Every(n))) for n in (2, 3, 4)],
        ("diffusers PAB", "diffusers FasterCache"),
    ),
}
