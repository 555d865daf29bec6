"""A denoiser in the user's own loop: techniques act inside `run` and nowhere else."""

import gc
import weakref

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler

from fewstep import AcceleratedPipeline, Recipe, Unsupported, accelerate, release, run
from fewstep.accel.cache.cross_attention import CrossAttentionCache
from fewstep.accel.cache.text import TextCache
from fewstep.accel.run import current_run
from fewstep.accel.zoo.tiny import tiny


def loop(unet, scheduler, text):
    """Batched guidance, as a user writes it."""
    scheduler.set_timesteps(3)
    x = torch.ones(1, 4, 8, 8)
    with torch.no_grad():
        for t in scheduler.timesteps:
            uncond, cond = unet(torch.cat([x, x]), t, text).sample.chunk(2)
            x = scheduler.step(uncond + 3 * (cond - uncond), t, x).prev_sample
    return x


@pytest.fixture
def parts():
    torch.manual_seed(0)
    unet = tiny("sd").unet
    return unet, DDIMScheduler(clip_sample=False), torch.randn(2, 7, unet.config.cross_attention_dim)


def test_the_same_picture_with_the_techniques_at_work(parts):
    unet, scheduler, text = parts
    plain = loop(unet, scheduler, text)
    assert accelerate(unet, Recipe(CrossAttentionCache())) is unet
    with run(scheduler, rows=["uncond", "cond"]) as state:
        assert torch.equal(loop(unet, scheduler, text), plain)
    counts = state.report.counts["cross_attention_cache"]
    assert counts["reused"] == 2 * counts["computed"] > 0
    assert (state.report.denoiser_calls, state.report.nfe, state.step) == (3, 6, 3)
    assert type(scheduler) is DDIMScheduler and current_run() is None
    release(unet)
    assert "forward" not in vars(unet)


def test_rows_carry_the_named_branches_and_the_noise_level(parts):
    unet, scheduler, text = parts
    accelerate(unet, Recipe())
    seen = []
    handle = unet.conv_in.register_forward_hook(lambda *_: seen.append(current_run().rows))
    with run(scheduler, rows=["uncond", "cond"]):
        loop(unet, scheduler, text)
    handle.remove()
    release(unet)
    assert [[(r.branch, r.image, r.step) for r in rows] for rows in seen] == [
        [("uncond", 0, k), ("cond", 0, k)] for k in range(3)
    ]
    alphas = scheduler.alphas_cumprod[scheduler.timesteps]
    torch.testing.assert_close(torch.tensor([rows[0].sigma for rows in seen]), ((1 - alphas) / alphas).sqrt())


def test_outside_a_run_it_is_plain_with_one_warning(parts):
    unet, scheduler, text = parts
    plain = loop(unet, scheduler, text)
    accelerate(unet, Recipe(CrossAttentionCache()))
    with pytest.warns(UserWarning, match=r"fewstep\.run") as caught:
        assert torch.equal(loop(unet, scheduler, text), plain)
    assert len(caught) == 1
    release(unet)


def test_two_loops_do_not_share_what_they_remember(parts):
    unet, scheduler, text = parts
    accelerate(unet, Recipe(CrossAttentionCache()))
    with run(scheduler):
        first = loop(unet, scheduler, text)
    with run(EulerDiscreteScheduler()) as state:
        loop(unet, state.scheduler, text)
    with run(scheduler):
        assert torch.equal(loop(unet, scheduler, text), first)
    release(unet)


def test_the_scheduler_is_itself_again_after_an_error(parts):
    unet, scheduler, _ = parts
    accelerate(unet, Recipe())
    with pytest.raises(ZeroDivisionError), run(scheduler):
        raise ZeroDivisionError
    assert type(scheduler) is DDIMScheduler and current_run() is None
    release(unet)


def test_what_cannot_work_is_refused_in_words(parts):
    unet, _, _ = parts
    with pytest.raises(Unsupported, match="pipeline"):
        accelerate(unet, Recipe(TextCache()))
    with pytest.raises(Unsupported, match="not a module"):
        accelerate(tiny("sd"), Recipe())
    accelerate(unet, Recipe())
    with pytest.raises(Unsupported, match="release"):
        accelerate(unet, Recipe())
    release(unet)
    with pytest.raises(Unsupported, match="not accelerated"):
        release(unet)


def test_a_denoiser_that_nobody_holds_is_freed_with_its_recipe():
    """Two hundred million weights a model: what `accelerate` put on it must not keep it."""

    def used():
        unet = accelerate(tiny("sd").unet, Recipe(CrossAttentionCache()))
        text = torch.randn(2, 7, unet.config.cross_attention_dim)
        with run(rows=["uncond", "cond"]) as state, torch.no_grad():
            unet(torch.ones(2, 4, 8, 8), torch.tensor(5), text)
        assert state.report.denoiser_calls == 1
        return weakref.ref(unet)

    def piped():
        pipe = AcceleratedPipeline(tiny("sd"), Recipe(CrossAttentionCache()))
        pipe("a fox", num_inference_steps=2, output_type="latent")
        return weakref.ref(pipe.unet)

    kept = [used(), piped()]
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
