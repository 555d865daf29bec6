"""Bfloat16: 16 bits inside the denoiser, the model's own type outside of it."""

import gc
import weakref

import pytest
import torch

from fewstep import AcceleratedPipeline, Recipe, Unsupported, accelerate, release, run
from fewstep.accel.kernels import precision
from fewstep.accel.kernels.memory_format import ChannelsLast
from fewstep.accel.kernels.precision import Bfloat16, castable
from fewstep.accel.zoo.tiny import FAMILIES, tiny

LEAST_PSNR = 40.0  # decibels, of the pictures; the families lie between 46 and 62


@pytest.fixture(autouse=True)
def capable(monkeypatch):
    monkeypatch.setitem(precision.HARDWARE, "cpu", lambda: True)


def psnr(found, plain):
    found, plain = found.double(), plain.double()
    return 10 * torch.log10((plain.max() - plain.min()) ** 2 / (found - plain).square().mean())


def tensors(pipe):
    parts = [p for p in pipe.components.values() if isinstance(p, torch.nn.Module)]
    found = [t for part in parts for t in (*part.parameters(), *part.buffers())]
    return [(t.dtype, t.stride(), t.data_ptr()) for t in found]


def attributes(pipe):
    return {name: {k: id(v) for k, v in vars(m).items()} for name, m in pipe.components["unet"].named_modules()}


@pytest.mark.parametrize("family", ["sd", "sd_controlnet", "sdxl", "ddpm", "dit", "flux", "wan", "cogvideox"])
def test_close_pictures_and_exact_undo(family, outputs):
    pipe = tiny(family)
    plain, before = outputs(pipe, family), tensors(pipe)
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()))
    found = outputs(fast, family)
    assert not torch.equal(found, plain)
    assert psnr(found, plain) >= LEAST_PSNR
    assert torch.equal(outputs(fast, family), found)
    fast.detach()
    assert tensors(pipe) == before
    assert torch.equal(outputs(pipe, family), plain)


def test_nothing_is_left_on_the_modules():
    pipe = tiny("sd")
    before = attributes(pipe)
    AcceleratedPipeline(pipe, Recipe(Bfloat16())).detach()
    assert attributes(pipe) == before


def test_latents_stay_float32_and_the_network_does_not():
    pipe, seen, steps = tiny("sd"), [], []
    pipe.unet.mid_block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))

    def note(pipe, step, timestep, kwargs):
        steps.append(kwargs["latents"].dtype)
        return kwargs

    AcceleratedPipeline(pipe, Recipe(Bfloat16()))(**FAMILIES["sd"].call(), callback_on_step_end=note)
    assert set(seen) == {torch.bfloat16}
    assert set(steps) == {torch.float32}


def test_what_diffusers_keeps_in_float32_stays():
    pipe = tiny("wan")
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()))
    types = {name: p.dtype for name, p in pipe.transformer.named_parameters()}
    kept = {name for name, dtype in types.items() if dtype == torch.float32}
    assert kept and all({"time_embedder", "scale_shift_table", "norm2"} & set(name.split(".")) for name in kept)
    report = fast.run(**FAMILIES["wan"].call()).report
    assert any("float32" in note and "time_embedder" in note for note in report.notes)


def test_positions_and_timesteps_keep_their_bits():
    pipe, seen = tiny("flux"), {}
    pipe.transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True)
    AcceleratedPipeline(pipe, Recipe(Bfloat16()))(**FAMILIES["flux"].call())
    types = {name: value.dtype for name, value in seen.items() if isinstance(value, torch.Tensor)}
    assert types["timestep"] == types["img_ids"] == types["guidance"] == torch.float32
    assert types["hidden_states"] == types["pooled_projections"] == torch.bfloat16


def test_bare_calls_and_siblings_work(outputs):
    """The weights are shared, so the casts have to act for everyone who calls the model."""
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()))
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    with pytest.warns(UserWarning, match="runs plain"):
        assert pipe.unet(x, 3, text).sample.dtype == torch.float32
    assert pipe.unet(x, 3, text, return_dict=False)[0].dtype == torch.float32
    assert torch.equal(outputs(pipe, "sd"), outputs(fast, "sd"))


def test_own_loop():
    pipe = tiny("sd")
    x, text = torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    with torch.no_grad():
        plain = pipe.unet(x, 3, text).sample
        accelerate(pipe.unet, Recipe(Bfloat16()))
        with run():
            fast = pipe.unet(x, 3, text).sample
        release(pipe.unet)
        assert torch.equal(pipe.unet(x, 3, text).sample, plain)
    assert 0 < (fast - plain).norm() <= 3e-2 * plain.norm()


def test_originals_can_be_freed():
    pipe = tiny("sd")
    address = pipe.unet.conv_in.weight.untyped_storage()
    original = weakref.ref(address)
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()), keep_original=False)
    del address
    gc.collect()
    assert original() is None
    with pytest.raises(Unsupported, match="bfloat16 freed"):
        fast.detach()


def test_refuses_what_it_cannot_improve(monkeypatch):
    with pytest.raises(Unsupported, match="already"):
        AcceleratedPipeline(tiny("sd").to(torch.bfloat16), Recipe(Bfloat16()))
    offloaded = tiny("sd")
    offloaded.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(Unsupported, match="enable_model_cpu_offload"):
        AcceleratedPipeline(offloaded, Recipe(Bfloat16()))
    monkeypatch.setitem(precision.HARDWARE, "cpu", lambda: False)
    with pytest.raises(Unsupported, match="emulated"):
        AcceleratedPipeline(tiny("sd"), Recipe(Bfloat16()))


@pytest.mark.parametrize("when", ["before", "after"])
def test_model_offload(when, outputs):
    pipe = tiny("sd")
    expected = outputs(AcceleratedPipeline(tiny("sd"), Recipe(Bfloat16())), "sd")
    plain = outputs(pipe, "sd")
    if when == "before":
        pipe.enable_model_cpu_offload(device="cpu")
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()))
    if when == "after":
        fast.enable_model_cpu_offload(device="cpu")
    for _ in range(3):
        assert torch.equal(outputs(fast, "sd"), expected)
    fast.detach()
    assert torch.equal(outputs(pipe, "sd"), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lora_loaded_afterwards(dtype, outputs):
    """It acts, in its own type, and all comes off in the end. Its own weights stay as they were loaded."""
    pytest.importorskip("peft")
    from peft import LoraConfig

    pipe = tiny("sd")
    plain = outputs(pipe, "sd")
    fast = AcceleratedPipeline(pipe, Recipe(Bfloat16()))
    without = outputs(fast, "sd")
    fast.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    for name, parameter in fast.unet.named_parameters():
        parameter.data = parameter.data.to(dtype) if "lora" in name else parameter.data
    with_adapter = outputs(fast, "sd")
    assert not torch.equal(with_adapter, without)
    assert torch.equal(outputs(fast, "sd"), with_adapter)
    fast.detach()
    assert all(p.dtype == torch.float32 for name, p in pipe.unet.named_parameters() if "lora" not in name)
    assert psnr(with_adapter, outputs(pipe, "sd")) >= LEAST_PSNR
    pipe.unet.delete_adapters("default")
    assert torch.equal(outputs(pipe, "sd"), plain)


def test_beside_channels_last(outputs):
    pipe = tiny("sd")
    plain, before = outputs(pipe, "sd"), [(p.dtype, p.stride()) for p in pipe.unet.parameters()]
    fast = AcceleratedPipeline(pipe, Recipe(ChannelsLast(), Bfloat16()))
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in pipe.unet.parameters() if p.ndim == 4)
    assert not list(castable(pipe.unet))
    assert psnr(outputs(fast, "sd"), plain) >= LEAST_PSNR
    fast.detach()
    assert [(p.dtype, p.stride()) for p in pipe.unet.parameters()] == before
    assert torch.equal(outputs(pipe, "sd"), plain)
