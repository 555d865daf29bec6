"""Configurations of other caches as recipes: `from_peer(config)`, whatever library it is from.

| Peer | Here | Same picture? |
|---|---|---|
| DeepCache helper or params: cache_interval, cache_branch_id | DeepCache: when=Every(interval), depth=branch | yes |
| diffusers FirstBlockCacheConfig: threshold | FirstBlockCache, reuse in a row unlimited | of one row [1] |
| diffusers MagCacheConfig: all fields | Forecast of order 0, when=Listed by the ratios | yes [2] |
| diffusers TaylorSeerCacheConfig: interval, before_step, max_order | Forecast at the same steps | no [3] |
| diffusers PyramidAttentionBroadcastConfig: all ranges | AttentionBroadcast: Every(range) & Window | no [4] |
| cache-dit DBCacheConfig with Fn 1 and Bn 0: thresholds | FirstBlockCache | of one row [1] |
| ... max_warmup_steps, warmup_interval, steps_computation_mask | Forecast: when=Dynamic & Listed | of one row [1] |
| ... with TaylorSeerCalibratorConfig: taylorseer_order | the same Forecast with its order | no [3] |

[1] A decision here is each row's own; theirs is one for the batch. Guidance branches need not be told apart by hand, so
enable_separate_cfg, cfg_compute_first, cfg_diff_compute_separate and num_inference_steps are not needed.
[2] For as many steps as the configuration says; ratios are not looked up by step afterwards.
[3] They extrapolate each layer over the count of steps, we what all blocks add over the noise level.
[4] Theirs counts through the timesteps at which it does not skip.

Anything else that would change the picture raises `Unsupported`, which names the field and what is nearest. The peers'
packages are not imported: configurations are known by the names of their classes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from .. import catalog
from ..errors import InvalidRecipe, Unsupported
from ..policy import Dynamic, Every, Listed, Policy, Window
from ..recipe import Recipe
from ..run import noise_level
from .deep import DeepCache
from .first_block import FirstBlockCache
from .forecast import Forecast

UNLIMITED = 10_000  # reuses in a row: more than any call has evaluations
ALWAYS = 1e9  # a threshold that every change is below


def from_peer(config: Any, calibrator: Any = None, *, scheduler: Any = None) -> Recipe:
    """The recipe that does what `config` asks of its own library.

    `calibrator`: cache-dit's second configuration. `scheduler`: the pipeline's, where ranges are given in timesteps.
    Also takes the dict of DeepCache's `set_params`, and one with cache-dit's cache_config and calibrator_config.
    Raises `Unsupported` for what has no equal here, `InvalidRecipe` for what is no configuration.
    """
    if isinstance(config, Mapping):
        return from_mapping(config, scheduler)
    convert = next((PEERS[base.__name__] for base in type(config).__mro__ if base.__name__ in PEERS), None)
    if convert is None:
        raise InvalidRecipe(f"{type(config).__name__} is no configuration that is known here: {', '.join(PEERS)}")
    return convert(config, calibrator, scheduler)


def from_mapping(config: Mapping[str, Any], scheduler: Any) -> Recipe:
    if "cache_config" in config:
        return from_peer(config["cache_config"], config.get("calibrator_config"), scheduler=scheduler)
    if "cache_interval" in config:
        return deep_cache_params(config)
    raise InvalidRecipe(f"{sorted(config)}: give cache_interval (DeepCache), or cache_config (cache-dit)")


def refuse(config: Any, field: str, nearest: str) -> NoReturn:
    value = config[field] if isinstance(config, Mapping) else getattr(config, field)
    kind = "DeepCache" if isinstance(config, Mapping) else type(config).__name__
    raise Unsupported(f"{kind}: {field}={value!r} has no equal here; nearest: {nearest}")


def only(config: Any, nearest: str, **allowed: Any) -> None:
    """Refuses the first field that is not as given; one that the configuration does not have is as given."""
    for field, value in allowed.items():
        if getattr(config, field, value) != value:
            refuse(config, field, nearest)


# ---------------------------------------------------------------------------------------------------- DeepCache


def deep_cache_helper(helper: Any, calibrator: Any, scheduler: Any) -> Recipe:
    if not hasattr(helper, "params"):
        raise InvalidRecipe("this DeepCache helper has no parameters yet: call its set_params first")
    return deep_cache_params(helper.params)


def deep_cache_params(params: Mapping[str, Any]) -> Recipe:
    """As `set_params` takes them, or as the helper keeps them: the branch as block and layer."""
    if params.get("skip_mode", "uniform") != "uniform":
        refuse(params, "skip_mode", "uniform, or DeepCache(when=Listed(...)) with the evaluations to compute")
    kept = 3 * params.get("cache_block_id", 0) + params.get("cache_layer_id", 0)
    return Recipe(DeepCache(when=Every(params["cache_interval"]), depth=params.get("cache_branch_id", kept)))


# ---------------------------------------------------------------------------------------------------- diffusers


def first_block(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    return Recipe(FirstBlockCache(threshold=config.threshold, max_consecutive=UNLIMITED))


def taylor_seer(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    only(
        config,
        "Forecast, which takes all blocks",
        skip_predict_identifiers=None,
        cache_identifiers=None,
    )
    only(config, "Forecast(when=Every(n) & Window(stop=...)), in noise levels", disable_cache_after_step=None)
    if config.max_order not in (0, 1, 2):
        refuse(config, "max_order", "2")
    before = config.disable_cache_before_step
    computed = Listed((*range(before), before + 1))  # predicted once, then the interval begins
    return Recipe(Forecast(when=Every(config.cache_interval) & computed, order=config.max_order, damping=0.0))


def mag_cache(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    only(config, "its ratios: run the calibration first", calibrate=False)
    return Recipe(Forecast(when=Listed(mag_steps(config)), order=0, damping=0.0))


def mag_steps(config: Any) -> tuple[int, ...]:
    """The evaluations that MagCache computes: its ratios are known beforehand, and so are its decisions."""
    computed, ratio, error, skipped = [0], 1.0, 0.0, 0
    retained = int(config.retention_ratio * config.num_inference_steps + 0.5)
    for step, scale in enumerate(float(r) for r in config.mag_ratios):
        if step < retained:
            computed.append(step)
            continue
        ratio, skipped = ratio * scale, skipped + 1
        error += abs(1.0 - ratio)
        if step == 0 or error > config.threshold or skipped > config.max_skip_steps:
            computed.append(step)
            ratio, error, skipped = 1.0, 0.0, 0
    return tuple(sorted(set(computed)))


def pyramid(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    if "attention_broadcast" not in catalog.TECHNIQUES:
        raise Unsupported("PyramidAttentionBroadcastConfig has no equal here; nearest: CrossAttentionCache")
    ranges = {k: getattr(config, f"{k}_attention_block_skip_range") for k in ("spatial", "cross", "temporal")}
    if not any(ranges.values()):
        ranges["spatial"] = 2  # as diffusers does
    policies = {k: skipping(config, k, n, scheduler) if n else Every(1) for k, n in ranges.items()}
    return Recipe(catalog.technique("attention_broadcast")(**policies))


def skipping(config: Any, kind: str, n: int, scheduler: Any) -> Policy:
    field = f"{kind}_attention_timestep_skip_range"
    low, high = getattr(config, field)
    if low < 0 and high >= 1000:
        return Every(n)
    if scheduler is None:
        raise Unsupported(
            f"{type(config).__name__}: {field}={(low, high)} is in timesteps, whose noise the pipeline's scheduler "
            "knows: from_peer(config, scheduler=pipe.scheduler)"
        )
    return Every(n) & Window(start=level(scheduler, high), stop=level(scheduler, low))


def level(scheduler: Any, timestep: float) -> float:
    """The noise level at a timestep: infinite from the last on, of a flow the timestep's share."""
    last = scheduler.config.num_train_timesteps - 1
    if timestep <= 0:
        return 0.0
    if timestep >= last:
        return math.inf
    found = noise_level(scheduler, timestep)
    return timestep / (last + 1) if math.isnan(found) else found


def faster_cache(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    refuse(
        config, "unconditional_batch_skip_range", "AttentionBroadcast, which reuses attention and no guidance branch"
    )


def sea_cache(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    refuse(config, "threshold", f"TeaCache(threshold={config.threshold}), which weighs no frequencies")


# ---------------------------------------------------------------------------------------------------- cache-dit


def dual_block(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    if str(config.cache_type) == "NONE":
        return Recipe()
    only(config, "Fn_compute_blocks=1: FirstBlockCache decides after one block", Fn_compute_blocks=1)
    only(config, "Bn_compute_blocks=0", Bn_compute_blocks=0)
    only(config, "max_continuous_cached_steps", max_cached_steps=-1)
    only(config, "TeaCache, whose threshold is a sum", max_accumulated_residual_diff_threshold=None)
    only(config, "steps_computation_mask", force_refresh_step_hint=None)
    order, dynamic, computed = order_of(calibrator), dynamic_of(config), computed_of(config)
    if order == 0 and not computed and config.steps_computation_mask is None:
        return Recipe(FirstBlockCache(threshold=dynamic.threshold, max_consecutive=dynamic.max_consecutive))
    when = dynamic & Listed(computed) if computed else dynamic
    return Recipe(Forecast(when=when, order=order, damping=0.0))


def dynamic_of(config: Any) -> Dynamic:
    if config.steps_computation_mask is not None and config.steps_computation_policy == "static":
        return Dynamic(ALWAYS, UNLIMITED)
    limit = config.max_continuous_cached_steps
    if limit == 0:
        refuse(config, "max_continuous_cached_steps", "Recipe() without a cache: it forbids all reuse")
    return Dynamic(float(config.residual_diff_threshold), limit if limit > 0 else UNLIMITED)


def computed_of(config: Any) -> tuple[int, ...]:
    """Evaluations that are computed whatever changes. The first always is."""
    mask = config.steps_computation_mask
    if mask is not None:
        return tuple(step for step, flag in enumerate(mask) if flag)
    steps = tuple(range(0, config.max_warmup_steps, config.warmup_interval))
    return steps if len(steps) > 1 else ()


def order_of(calibrator: Any) -> int:
    if calibrator is None or not calibrator.enable_calibrator:
        return 0
    only(calibrator, "taylorseer: TaylorSeerCalibratorConfig()", calibrator_type="taylorseer")
    only(calibrator, "True: Forecast extrapolates every stream", enable_encoder_calibrator=True)
    if calibrator.taylorseer_order not in (0, 1, 2):
        refuse(calibrator, "taylorseer_order", "2")
    return calibrator.taylorseer_order


def pruned(config: Any, calibrator: Any, scheduler: Any) -> Recipe:
    refuse(config, "cache_type", f"FirstBlockCache(threshold={config.residual_diff_threshold}), for all blocks at once")


PEERS: dict[str, Callable[[Any, Any, Any], Recipe]] = {
    "DeepCacheSDHelper": deep_cache_helper,
    "FirstBlockCacheConfig": first_block,
    "TaylorSeerCacheConfig": taylor_seer,
    "MagCacheConfig": mag_cache,
    "PyramidAttentionBroadcastConfig": pyramid,
    "FasterCacheConfig": faster_cache,
    "SeaCacheConfig": sea_cache,
    "DBPruneConfig": pruned,
    "DBCacheConfig": dual_block,
    "BasicCacheConfig": dual_block,
}
