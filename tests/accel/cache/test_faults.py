"""What users of other caches met: each of these is wrong in at least one of them."""

import copy

import pytest
import torch
from peft import LoraConfig

from fewstep import AcceleratedPipeline, Recipe, accelerate, release
from fewstep import run as opened
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.kernels.compile import CompileBlocks
from fewstep.accel.policy import Every
from fewstep.accel.zoo.tiny import FAMILIES, tiny

UNET = (DeepCache(when=Every(2)), FirstBlockCache(threshold=9.0, max_consecutive=1), Forecast(when=Every(2)))


def of_family(family):
    return UNET if "unet" in FAMILIES[family].tags else UNET[1:]


def denoiser_of(pipe):
    return next(getattr(pipe, n) for n in ("unet", "transformer") if getattr(pipe, n, None) is not None)


def first_inputs(family):
    """The denoiser of a family, and what its pipeline asked of it at its first call."""
    pipe, seen = tiny(family), []
    denoiser = denoiser_of(pipe)
    hook = denoiser.register_forward_pre_hook(lambda m, a, k: seen.append(copy.deepcopy((a, k))), with_kwargs=True)
    pipe(**FAMILIES[family].call() | {"num_inference_steps": 5})
    hook.remove()
    return denoiser, *seen[0]


def tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    return [t for part in (output.values() if hasattr(output, "values") else output) for t in tensors(part)]


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "sd_pag"])
def test_at_equal_inputs_reuse_changes_nothing(family):
    """So nothing is lost, and nothing, such as a ControlNet's residual, is added twice."""
    denoiser, args, kwargs = first_inputs(family)
    for technique in of_family(family):
        accelerate(denoiser, Recipe(technique))
        with opened() as state:
            first, second = denoiser(*args, **kwargs), None
            state.advance()
            second = denoiser(*args, **kwargs)
        release(denoiser)
        assert state.report.counts[technique.name]["reused"] > 0
        for a, b in zip(tensors(first), tensors(second), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
def test_positional_and_keyword_calls_and_a_timestep_for_each_row(technique):
    unet, args, kwargs = first_inputs("sd")
    sample = args[0]
    times = torch.tensor([900, 300])
    ways = [
        lambda: unet(sample, times, kwargs["encoder_hidden_states"]).sample,
        lambda: unet(sample=sample, timestep=times, encoder_hidden_states=kwargs["encoder_hidden_states"]).sample,
        lambda: unet(sample, times, encoder_hidden_states=kwargs["encoder_hidden_states"], return_dict=False)[0],
    ]
    plain = ways[0]()
    accelerate(unet, Recipe(technique))
    for way in ways:
        with opened() as state:
            found = []
            for _ in range(2):
                found.append(way())
                state.advance()
        assert torch.equal(found[0], plain) and state.report.counts[technique.name]["reused"] == 2
        torch.testing.assert_close(found[1], plain, rtol=1e-4, atol=1e-5)
    release(unet)


@torch.no_grad()
def test_two_calls_a_step_on_one_module_never_meet():
    """Wan calls the prompt and the empty prompt one after the other: each reuses what it added itself."""
    pipe = tiny("wan")
    call = FAMILIES["wan"].call() | {"num_inference_steps": 4, "output_type": "latent"}
    blocks = pipe.transformer.blocks
    kept, calls, entry = {}, [0], {}

    def enter(block, args, kwargs):
        calls[0] += 1
        entry["x"] = args[0] if args else kwargs["hidden_states"]

    def leave(block, args, output):
        evaluation, branch = divmod(calls[0] - 1, 2)
        if evaluation % 2 == 0:
            kept[branch] = output - entry["x"]
            return output
        return entry["x"] + kept[branch]

    hooks = [
        blocks[0].register_forward_pre_hook(enter, with_kwargs=True),
        blocks[-1].register_forward_hook(leave),
    ]
    expected = pipe(**call).frames
    for hook in hooks:
        hook.remove()
    fast = AcceleratedPipeline(pipe, Recipe(Forecast(when=Every(2), order=0)))
    found = fast(**FAMILIES["wan"].call() | {"num_inference_steps": 4, "output_type": "latent"}).frames
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
def test_an_exception_in_a_callback_and_then_another_resolution(technique, outputs):
    def stop(pipe, step, timestep, kwargs):
        if step == 1:
            raise ArithmeticError("stop")
        return kwargs

    other = {"height": 64, "width": 32, "num_images_per_prompt": 2}
    fresh = outputs(AcceleratedPipeline(tiny("sd"), Recipe(technique)), "sd", **other)
    fast = AcceleratedPipeline(tiny("sd"), Recipe(technique))
    with pytest.raises(ArithmeticError):
        outputs(fast, "sd", callback_on_step_end=stop)
    assert torch.equal(outputs(fast, "sd", **other), fresh)


@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
@pytest.mark.parametrize("count", [1, 2])
def test_guidance_off_at_batch_one_and_two(technique, count, outputs):
    pipe = tiny("sd")
    off = {"guidance_scale": 1.0, "num_images_per_prompt": count}
    plain = outputs(pipe, "sd", **off)
    fast = AcceleratedPipeline(pipe, Recipe(technique.identity()))
    assert torch.equal(outputs(fast, "sd", **off), plain)
    fast.detach()
    result = AcceleratedPipeline(pipe, Recipe(technique)).run(**FAMILIES["sd"].call() | off)
    assert result.report.counts[technique.name] == {"computed": 2 * count, "reused": count}


@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
def test_enabled_twice_and_taken_off_in_any_order(technique, outputs):
    pipe = tiny("sd")
    plain = outputs(pipe, "sd")
    first, second = (AcceleratedPipeline(pipe, Recipe(technique)) for _ in range(2))
    expected = outputs(first, "sd")
    assert torch.equal(outputs(second, "sd"), expected) and not torch.equal(expected, plain)
    first.detach()
    assert torch.equal(outputs(second, "sd"), expected)
    second.detach()
    assert torch.equal(outputs(pipe, "sd"), plain)


@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lora_before_and_after(technique, when, outputs):
    def lora(pipe):
        torch.manual_seed(0)
        pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k"], init_lora_weights=False))

    pipe = tiny("sd")
    lora(pipe)
    plain = outputs(pipe, "sd")
    pipe = tiny("sd")
    if when == "before":
        lora(pipe)
    fast = AcceleratedPipeline(pipe, Recipe(technique.identity()))
    if when == "after":
        outputs(fast, "sd")
        lora(pipe)
    assert torch.equal(outputs(fast, "sd"), plain)


def test_a_deep_copy_is_plain_and_the_original_stays_fast(outputs):
    pipe = tiny("sd")
    plain = outputs(pipe, "sd")
    fast = AcceleratedPipeline(pipe, Recipe(DeepCache(when=Every(2))))
    expected = outputs(fast, "sd")
    assert torch.equal(outputs(copy.deepcopy(pipe), "sd"), plain)
    assert torch.equal(outputs(fast, "sd"), expected)


@pytest.mark.parametrize("technique", UNET, ids=lambda t: t.name)
def test_compiled_inside_and_cached_outside(technique, outputs):
    alone = outputs(AcceleratedPipeline(tiny("sd"), Recipe(technique)), "sd")
    both = AcceleratedPipeline(tiny("sd"), Recipe(technique, CompileBlocks(backend="eager")))
    torch.testing.assert_close(outputs(both, "sd"), alone, rtol=1e-4, atol=1e-5)
    report = both.run(**FAMILIES["sd"].call()).report
    assert report.recompiles == 0 and report.counts[technique.name]["reused"] > 0
