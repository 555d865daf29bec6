"""Feature caches against their peers, a brute-force reference, and rows that decide differently."""

import math

import numpy as np
import pytest
import torch
from DeepCache import DeepCacheSDHelper
from diffusers import EulerDiscreteScheduler, FirstBlockCacheConfig, HeunDiscreteScheduler

from fewstep import AcceleratedPipeline, Recipe, accelerate, release
from fewstep import run as fewstep_run
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.cache.reuse import WATCHED, Cache, Reuse, extrapolation, relative_change, sampled
from fewstep.accel.errors import InvalidRecipe, Unsupported
from fewstep.accel.policy import Dynamic, Every, Listed, Policy, Window
from fewstep.accel.run import Row, Run, entered
from fewstep.accel.zoo.tiny import tiny

STEPS = 6


def latents(pipe, prompts=("a red fox",), **options):
    """Final latents and the report; prompt k is drawn from seed k."""
    rng = [torch.Generator().manual_seed(i) for i in options.pop("seeds", range(len(prompts)))]
    call = {"num_inference_steps": STEPS, "guidance_scale": 4.0, "output_type": "latent", "height": 32, "width": 32}
    call |= {"prompt": list(prompts), "generator": rng} | options
    if isinstance(pipe, AcceleratedPipeline):
        result = pipe.run(**call)
        return result.output.images, result.report
    return pipe(**call).images, None


def close(found, expected, tolerance=1e-5):
    assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_deep_cache_equals_the_peer(depth):
    pipe = tiny("sd")
    ours, report = latents(AcceleratedPipeline(pipe, Recipe(DeepCache(when=Every(3), depth=depth))))
    assert report.counts["deep_cache"] == {"computed": 4, "reused": 8}
    helper = DeepCacheSDHelper(pipe=tiny("sd"))
    helper.pipe.set_progress_bar_config(disable=True)
    helper.set_params(cache_interval=3, cache_branch_id=depth)
    helper.enable()
    close(ours, latents(helper.pipe)[0])


@pytest.mark.parametrize("threshold", [0.05, 0.3, 1.0])
def test_first_block_cache_equals_diffusers_own(threshold):
    """Of one image without guidance, where a decision for the whole batch is the row's own."""
    once = {"guidance_scale": 3.5, "max_sequence_length": 16}
    fast = AcceleratedPipeline(tiny("flux"), Recipe(FirstBlockCache(threshold=threshold, max_consecutive=99)))
    ours, report = latents(fast, **once)
    peer = tiny("flux")
    peer.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    close(ours, latents(peer, **once)[0])
    counts = report.counts["first_block_cache"]
    assert counts["computed"] + counts["reused"] == STEPS


FAMILIES = {"sd": {}, "sdxl": {}, "pixart": {"use_resolution_binning": False, "max_sequence_length": 16}}
FORCED = {
    "sd": (DeepCache(when=Listed((0, 1, 4))), Forecast(when=Listed((0, 1, 4)), order=2)),
    "sdxl": (DeepCache(when=Listed((0, 3)), depth=1),),
    "pixart": (Forecast(when=Listed((0, 1, 4)), order=1),),
}


@pytest.mark.parametrize(("family", "technique"), [(f, t) for f, ts in FORCED.items() for t in ts])
def test_with_a_forced_mask_an_image_is_the_one_made_alone(family, technique):
    prompts, options = ["a red fox", "two blue cubes", "sand", "a tree in the snow"], FAMILIES[family]
    fast = AcceleratedPipeline(tiny(family), Recipe(technique))
    together, _ = latents(fast, prompts, **options)
    for k, prompt in enumerate(prompts):
        close(together[k : k + 1], latents(fast, [prompt], seeds=[k], **options)[0], 1e-4)


class Spy(Reuse):
    """Notes the decisions of every row."""

    def decide(self, changes):
        flags = super().decide(changes)
        for row, flag, change in zip(self.rows, flags, changes, strict=True):
            self.cache.seen.setdefault((row.image, row.branch), []).append((flag, change))
        return flags


@pytest.mark.parametrize(("family", "threshold"), [("sd", 0.391), ("pixart", 0.2), ("sdxl", 0.384)])
def test_dynamic_decisions_are_the_rows_own(family, threshold, monkeypatch):
    """Rows of one batch decide differently, each as it does alone, and the pictures are those made alone."""
    monkeypatch.setattr(Cache, "seen", {}, raising=False)
    monkeypatch.setattr("fewstep.accel.cache.reuse.Reuse", Spy)
    prompts, options = ["a red fox", "two blue cubes", "sand"], FAMILIES[family]
    fast = AcceleratedPipeline(tiny(family), Recipe(FirstBlockCache(threshold=threshold)))
    together, _ = latents(fast, prompts, **options)
    seen, alone = dict(Cache.seen), {}
    for k, prompt in enumerate(prompts):
        Cache.seen.clear()
        close(together[k : k + 1], latents(fast, [prompt], seeds=[k], **options)[0], 1e-4)
        alone |= {(k, branch): decisions for (_, branch), decisions in Cache.seen.items()}
    ties = [c for d in alone.values() for _, c in d if abs(c - threshold) < 1e-3 * threshold]
    assert not ties, "choose another threshold: this one proves nothing"
    assert {k: [f for f, _ in v] for k, v in seen.items()} == {k: [f for f, _ in v] for k, v in alone.items()}
    assert len({tuple(f for f, _ in v) for v in seen.values()}) > 1, "all rows decided alike: nothing was proved"


def test_a_threshold_that_decides_nothing_is_told_with_the_measured_range():
    for threshold, words in ((1e-6, "never allowed reuse"), (99.0, "always allowed reuse")):
        fast = AcceleratedPipeline(tiny("sd"), Recipe(FirstBlockCache(threshold=threshold, max_consecutive=99)))
        (note,) = latents(fast)[1].notes
        assert words in note and "choose a value in between" in note


def test_heun_evaluates_twice_a_step_and_is_counted_so():
    pipe = tiny("sd")
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    _, report = latents(AcceleratedPipeline(pipe, Recipe(DeepCache(when=Every(2)))))
    assert report.counts["deep_cache"] == {"computed": 12, "reused": 10}  # 11 evaluations of two rows


def test_image_to_image_counts_from_its_own_start():
    from fewstep.accel.zoo.tiny import FAMILIES as CALLS

    fast = AcceleratedPipeline(tiny("sd_img2img"), Recipe(DeepCache(when=Every(2))))
    call = CALLS["sd_img2img"].call
    fresh = fast.run(**call() | {"strength": 0.9})
    fast.run(**call() | {"strength": 0.4})
    again = fast.run(**call() | {"strength": 0.9})
    assert torch.equal(fresh.output.images, again.output.images)
    assert fresh.report.counts["deep_cache"] == {"computed": 4, "reused": 4}


def test_a_window_is_in_noise_levels_and_so_the_same_at_any_number_of_steps():
    pipe = tiny("sd")
    pipe.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    middle = Window(start=4.0, stop=0.4)
    fast = AcceleratedPipeline(pipe, Recipe(DeepCache(when=Every(100) & middle)))
    for steps in (10, 40):
        _, report = latents(fast, num_inference_steps=steps, guidance_scale=1.0)
        pipe.scheduler.set_timesteps(steps)
        inside = sum(middle.reuses(past_at(float(s))) for s in pipe.scheduler.sigmas[:-1])
        assert report.counts["deep_cache"]["reused"] == inside > steps / 10


def past_at(sigma):
    from fewstep.accel.policy import Past

    return Past(sigma=sigma)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (24, 40)])
def test_tiny_and_odd_latents(height, width):
    pipe = tiny("sd")
    plain, _ = latents(pipe, height=height, width=width)
    for technique in (DeepCache(when=Every(2)), FirstBlockCache(threshold=9.0), Forecast(when=Every(2))):
        fast = AcceleratedPipeline(pipe, Recipe(technique.identity()))
        assert torch.equal(latents(fast, height=height, width=width)[0], plain)
        fast.detach()
        fast = AcceleratedPipeline(pipe, Recipe(technique))
        assert latents(fast, height=height, width=width)[0].isfinite().all()
        fast.detach()


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_forecast_of_that_order_is_exact_on_polynomials_of_the_noise_level(order):
    """Kept at uneven levels; predicted beyond them. Above its order it is not."""
    levels = [9.0, 5.0, 2.0, 1.2]

    def feature(sigma, degree):
        return torch.full((1, 3), -math.atan(sigma)) ** degree + 2.0

    for degree in range(3):
        state = Reuse(Cache("forecast", torch.nn.Identity(), Every(9), order))
        with entered(Run()):
            for sigma in levels:
                state.rows = (Row(0, 0, "cond", 0, sigma),)
                state.settle(False)
                state.keep("span", (feature(sigma, degree),))
            state.rows = (Row(0, 0, "cond", 0, 0.7),)
            (found,) = state.predict("span")
        exact = torch.allclose(found, feature(0.7, degree), atol=1e-5)
        assert exact == (degree <= order)


@pytest.mark.parametrize("damping", [0.5, 2.0])
@pytest.mark.parametrize("order", [1, 2])
def test_a_damped_forecast_goes_a_share_of_the_way_that_falls_with_the_distance(order, damping):
    """numpy's polynomial through the same points says the whole way."""
    angles, far = [-1.4, -1.25, -1.0], [-0.9, -0.75, -0.5, 0.0]
    values = np.sin([3 * a for a in angles])
    polynomial = np.polynomial.Polynomial.fit(angles[-order - 1 :], values[-order - 1 :], order)
    for now in far:
        weights = extrapolation(angles[-order - 1 :][::-1], now, damping)
        found = np.dot(weights, values[-order - 1 :][::-1])
        distance = (now - angles[-1]) / (angles[-1] - angles[-2])
        share = (found - values[-1]) / (polynomial(now) - values[-1])
        assert share == pytest.approx(1 / (1 + damping * distance), abs=1e-9)
        assert sum(weights) == pytest.approx(1)


def test_rows_with_histories_of_different_length_are_each_extrapolated_by_their_own():
    state = Reuse(Cache("forecast", torch.nn.Identity(), Every(9), 1))
    first, second = Row(0, 0, "cond", 0, 3.0), Row(0, 1, "cond", 0, 3.0)
    with entered(Run()):
        for rows, sigma in (((first,), 3.0), ((first, second), 2.0)):
            state.rows = tuple(row._replace(sigma=sigma) for row in rows)
            state.settle(False)
            state.keep("span", (torch.full((len(rows), 2), math.atan(sigma)),))
        state.rows = (first._replace(sigma=1.0), second._replace(sigma=1.0))
        (found,) = state.predict("span")
    torch.testing.assert_close(found[0], torch.full((2,), math.atan(1.0)))
    torch.testing.assert_close(found[1], torch.full((2,), math.atan(2.0)))


class Weird(Policy):
    kind = "weird"

    def reuses(self, past):
        return True


@pytest.mark.parametrize(
    ("technique", "family", "error", "words"),
    [
        (DeepCache(), "flux", Unsupported, "use FirstBlockCache or Forecast"),
        (DeepCache(depth=99), "sd", Unsupported, "depths from 0 to"),
        (DeepCache(when=Dynamic(0.1)), "sd", Unsupported, "use FirstBlockCache"),
        (DeepCache(when=Window()), "sd", Unsupported, "never computes inside its window: Every.3."),
        (DeepCache(when=3), "sd", InvalidRecipe, "give a policy, for instance Every.3."),
        (Forecast(order=3), "sd", Unsupported, "1 draws a line"),
        (Forecast(depth=1), "flux", Unsupported, "depths from 0 to 0"),
        (Forecast(damping=-0.5), "sd", InvalidRecipe, "damping=-0.5.: 0, the undamped polynomial, or more"),
        (Forecast(damping=float("inf")), "flux", InvalidRecipe, "damping=inf.: 0, the undamped polynomial"),
        (Forecast(damping=float("nan")), "flux", InvalidRecipe, "damping=nan.: 0, the undamped polynomial"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(technique, family, error, words):
    with pytest.raises(error, match=words):
        AcceleratedPipeline(tiny(family), Recipe(technique))


class Block(torch.nn.Module):
    def __init__(self, pair=False):
        super().__init__()
        self.linear, self.pair = torch.nn.Linear(4, 4), pair

    def forward(self, x, other=None):
        return (self.linear(x), other) if self.pair else x + self.linear(x)


class Unknown(torch.nn.Module):
    """A transformer of the user's own, in no table but that of rows."""

    def __init__(self, between=False, pair=False):
        super().__init__()
        self.blocks, self.between, self.pair = torch.nn.ModuleList(Block(pair) for _ in range(3)), between, pair

    def forward(self, sample, timestep):
        x = sample + timestep
        for block in self.blocks:
            x = block(x)
            x = x[0] if self.pair else x * 2 if self.between else x
        return x


@pytest.fixture
def own_rows(monkeypatch):
    from fewstep.accel import anatomy

    monkeypatch.setitem(anatomy.ROW_ARGS, "Unknown", {"timestep": "shared"})


def loop(model, steps=6):
    x, seen = torch.ones(2, 4), []
    with fewstep_run() as state:
        for t in range(steps):
            seen.append(model(x, 1.0 / (t + 1)))
            state.advance()
    return torch.stack(seen)


@torch.no_grad()
def test_an_unknown_transformer_is_inferred_and_proved(own_rows):
    torch.manual_seed(0)
    model = Unknown()
    plain = loop(model)
    accelerate(model, Recipe(Forecast(when=Every(1))))
    assert torch.equal(loop(model), plain)
    release(model)
    accelerate(model, Recipe(Forecast(when=Every(2), order=0)))
    reused = loop(model)
    release(model)
    assert torch.equal(reused[::2], plain[::2]) and not torch.equal(reused[1::2], plain[1::2])
    entry = torch.ones(2, 4) + 1.0 / 2  # of the second evaluation, to which is added what the first one added
    torch.testing.assert_close(reused[1], entry + plain[0] - (torch.ones(2, 4) + 1.0))


@torch.no_grad()
@pytest.mark.parametrize("odd", [{"between": True}, {"pair": True}])
def test_an_unknown_transformer_that_is_not_so_is_refused_at_its_first_evaluation(odd, own_rows):
    model = Unknown(**odd)
    accelerate(model, Recipe(Forecast()))
    with pytest.raises(Unsupported, match="more than one stream"):
        loop(model)
    release(model)


def test_of_a_large_feature_some_lines_are_watched_and_tell_the_same():
    rng = torch.Generator().manual_seed(0)
    small, tokens = torch.randn(2, 64, 256, generator=rng), torch.randn(2, 1024, 640, generator=rng)
    picture = torch.randn(2, 320, 64, 64, generator=rng)
    assert sampled(small) is small
    for feature in (tokens, picture):
        changed = feature + 0.1 * torch.randn(feature.shape, generator=rng)
        assert sampled(feature)[0].numel() <= max(2 * WATCHED, feature[0].numel() / 7)
        whole = torch.tensor(relative_change(changed, feature, 2))
        part = torch.tensor(relative_change(sampled(changed), sampled(feature), 2))
        torch.testing.assert_close(part, whole, rtol=2e-2, atol=0)
