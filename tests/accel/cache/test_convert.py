"""Configurations of the peers, as the peers' own objects, against the recipes that they become."""

import cache_dit
import pytest
import torch
from cache_dit import DBCacheConfig, DBPruneConfig, TaylorSeerCalibratorConfig
from DeepCache import DeepCacheSDHelper
from diffusers import (
    DDIMScheduler,
    FasterCacheConfig,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel import catalog
from fewstep.accel.cache.convert import ALWAYS, UNLIMITED, from_peer, level
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.errors import InvalidRecipe, Unsupported
from fewstep.accel.policy import Dynamic, Every, Listed, Window
from fewstep.accel.zoo.tiny import tiny

STEPS = 8


def latents(pipe, **options):
    call = {"prompt": "a red fox", "num_inference_steps": STEPS, "output_type": "latent", "height": 32, "width": 32}
    return pipe(**call | {"generator": torch.Generator().manual_seed(0)} | options).images


def close(found, expected, tolerance=1e-5):
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("interval", "branch"), [(2, 0), (3, 1), (3, 3)])
def test_a_deep_cache_helper_gives_the_peers_picture(interval, branch):
    helper = DeepCacheSDHelper(pipe=tiny("sd"))
    helper.set_params(cache_interval=interval, cache_branch_id=branch)
    recipe = from_peer(helper)
    assert recipe == from_peer({"cache_interval": interval, "cache_branch_id": branch}) == from_peer(helper.params)
    helper.enable()
    close(latents(AcceleratedPipeline(tiny("sd"), recipe)), latents(helper.pipe))


FLUX = {"guidance_scale": 3.5, "max_sequence_length": 16}


@pytest.mark.parametrize(
    "config",
    [
        FirstBlockCacheConfig(threshold=0.3),
        FirstBlockCacheConfig(threshold=1.0),
        MagCacheConfig(mag_ratios=[1.0, 0.98, 1.03, 0.99, 0.97, 1.02, 0.9, 0.95], num_inference_steps=STEPS),
        MagCacheConfig(mag_ratios=[1.0] * 4, num_inference_steps=STEPS, retention_ratio=0.0, max_skip_steps=2),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_diffusers_configuration_gives_diffusers_picture(config):
    peer = tiny("flux")
    plain = latents(peer, **FLUX)
    peer.transformer.enable_cache(config)
    expected = latents(peer, **FLUX)
    assert not torch.equal(expected, plain), "nothing was cached: nothing was proved"
    close(latents(AcceleratedPipeline(tiny("flux"), from_peer(config)), **FLUX), expected)


@pytest.mark.parametrize(("before", "interval"), [(3, 3), (0, 2), (2, 1), (3, 5)])
def test_a_taylor_seer_configuration_computes_the_peers_steps(before, interval):
    config = TaylorSeerCacheConfig(cache_interval=interval, disable_cache_before_step=before)
    recipe = from_peer(config)
    assert recipe.techniques[0].settings()["damping"] == 0, "TaylorSeer damps nothing"
    fast = AcceleratedPipeline(tiny("flux"), recipe)
    result = fast.run("a fox", num_inference_steps=STEPS, output_type="latent", height=32, width=32, **FLUX)
    theirs = sum(step < max(before, 1) or (step - before - 1) % interval == 0 for step in range(STEPS))
    assert result.report.counts["forecast"]["computed"] == theirs


def dual(**settings):
    return DBCacheConfig(**{"Fn_compute_blocks": 1, "max_warmup_steps": 0, "residual_diff_threshold": 0.2} | settings)


MASK = [1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize(
    ("config", "calibrator", "technique"),
    [
        (dual(), None, FirstBlockCache(threshold=0.2, max_consecutive=UNLIMITED)),
        (dual(max_continuous_cached_steps=2), None, FirstBlockCache(threshold=0.2, max_consecutive=2)),
        (
            dual(max_warmup_steps=3),
            None,
            Forecast(when=Dynamic(0.2, UNLIMITED) & Listed((0, 1, 2)), order=0, damping=0.0),
        ),
        (
            dual(max_warmup_steps=5, warmup_interval=2),
            None,
            Forecast(when=Dynamic(0.2, UNLIMITED) & Listed((0, 2, 4)), order=0, damping=0.0),
        ),
        (
            dual(),
            TaylorSeerCalibratorConfig(taylorseer_order=2),
            Forecast(when=Dynamic(0.2, UNLIMITED), order=2, damping=0.0),
        ),
        (
            dual(steps_computation_mask=MASK),
            None,
            Forecast(when=Dynamic(0.2, UNLIMITED) & Listed((0, 1, 3)), order=0, damping=0.0),
        ),
        (
            dual(steps_computation_mask=MASK, steps_computation_policy="static"),
            TaylorSeerCalibratorConfig(),
            Forecast(when=Dynamic(ALWAYS, UNLIMITED) & Listed((0, 1, 3)), order=1, damping=0.0),
        ),
    ],
)
def test_a_cache_dit_configuration_becomes_a_recipe_that_runs(config, calibrator, technique):
    recipe = from_peer(config, calibrator)
    assert recipe == Recipe(technique) == from_peer({"cache_config": config, "calibrator_config": calibrator})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert latents(AcceleratedPipeline(tiny("flux"), recipe), **FLUX).isfinite().all()


@pytest.mark.parametrize(
    "settings",
    [
        {"residual_diff_threshold": 0.3},
        {"residual_diff_threshold": 0.9, "max_continuous_cached_steps": 2},
        {"residual_diff_threshold": 0.3, "max_warmup_steps": 3},
        {"residual_diff_threshold": 0.6, "max_warmup_steps": 5, "warmup_interval": 2},
        {"residual_diff_threshold": 0.3, "steps_computation_mask": [1, 1, 0, 1, 0, 0, 1, 0]},
        {"steps_computation_mask": [1, 1, 0, 1, 0, 0, 1, 0], "steps_computation_policy": "static"},
    ],
)
def test_a_cache_dit_configuration_gives_its_picture(settings):
    config, peer = dual(**settings), tiny("flux")
    plain = latents(peer, **FLUX)
    peer.__class__ = type("FluxPipeline", (type(peer),), {})  # cache-dit changes the class, which others share
    cache_dit.enable_cache(peer, cache_config=config)
    expected = latents(peer, **FLUX)
    assert not torch.equal(expected, plain), "nothing was cached: nothing was proved"
    close(latents(AcceleratedPipeline(tiny("flux"), from_peer(config)), **FLUX), expected)


@pytest.mark.skipif("attention_broadcast" not in catalog.TECHNIQUES, reason="the technique is not there")
def test_pyramid_attention_broadcast_takes_its_noise_levels_from_the_scheduler():
    everywhere = PyramidAttentionBroadcastConfig(
        cross_attention_block_skip_range=6, cross_attention_timestep_skip_range=(-1, 1000)
    )
    broadcast = catalog.technique("attention_broadcast")
    assert from_peer(everywhere) == Recipe(broadcast(spatial=Every(1), temporal=Every(1), cross=Every(6)))
    config = PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2)
    with pytest.raises(Unsupported, match=r"spatial_attention_timestep_skip_range=.*scheduler=pipe.scheduler"):
        from_peer(config)
    (technique,) = from_peer(config, scheduler=FlowMatchEulerDiscreteScheduler()).techniques
    assert technique.spatial == Every(2) & Window(start=0.8, stop=0.1)
    assert from_peer(PyramidAttentionBroadcastConfig(), scheduler=FlowMatchEulerDiscreteScheduler()).techniques


def test_a_timestep_has_the_noise_of_the_scheduler():
    ddim, flow = DDIMScheduler(), FlowMatchEulerDiscreteScheduler()
    assert level(ddim, 999) == float("inf") and level(flow, -1) == 0.0
    alpha = float(ddim.alphas_cumprod[500])
    assert level(ddim, 500) == pytest.approx(((1 - alpha) / alpha) ** 0.5) and level(flow, 500) == 0.5


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DBCacheConfig(), "DBCacheConfig: Fn_compute_blocks=8 has no equal here; nearest: .*FirstBlockCache"),
        (dual(Bn_compute_blocks=2), "Bn_compute_blocks=2"),
        (dual(max_cached_steps=5), "max_cached_steps=5"),
        (dual(max_accumulated_residual_diff_threshold=0.5), "nearest: TeaCache"),
        (dual(force_refresh_step_hint=3), "force_refresh_step_hint=3"),
        (dual(max_continuous_cached_steps=0), "max_continuous_cached_steps=0"),
        (DBPruneConfig(), "DBPruneConfig: cache_type=.*nearest: FirstBlockCache"),
        (TaylorSeerCacheConfig(max_order=4), "max_order=4 has no equal here; nearest: 2"),
        (TaylorSeerCacheConfig(disable_cache_after_step=9), "disable_cache_after_step=9.*Window"),
        (TaylorSeerCacheConfig(cache_identifiers=["a"]), "cache_identifiers="),
        (MagCacheConfig(calibrate=True), "calibrate=True"),
        (FasterCacheConfig(), "nearest: AttentionBroadcast"),
        ({"cache_interval": 3, "skip_mode": "other"}, "DeepCache: skip_mode='other'"),
    ],
)
def test_what_has_no_equal_is_refused_with_what_is_nearest(config, words):
    with pytest.raises(Unsupported, match=words):
        from_peer(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (3, "int is no configuration that is known here"),
        ({"interval": 3}, "give cache_interval"),
        (DeepCacheSDHelper(), "call its set_params first"),
    ],
)
def test_what_is_no_configuration_is_refused(config, words):
    with pytest.raises(InvalidRecipe, match=words):
        from_peer(config)


def test_depth_and_interval_are_the_helpers():
    assert from_peer({"cache_interval": 5, "cache_branch_id": 4}) == Recipe(DeepCache(when=Every(5), depth=4))
    helper = DeepCacheSDHelper()
    helper.set_params(cache_interval=5, cache_branch_id=4)
    assert from_peer(helper) == Recipe(DeepCache(when=Every(5), depth=4))


def test_the_calibrator_may_be_off_and_may_not_be_half():
    off = TaylorSeerCalibratorConfig(enable_calibrator=False)
    assert from_peer(dual(), off) == from_peer(dual())
    with pytest.raises(Unsupported, match="enable_encoder_calibrator=False"):
        from_peer(dual(), TaylorSeerCalibratorConfig(enable_encoder_calibrator=False))
