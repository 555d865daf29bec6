"""ChannelsLast: the layout travels through the network, the numbers stay to rounding, and all of it comes off."""

import pytest
import torch

from fewstep import AcceleratedPipeline, Recipe, Unsupported
from fewstep.accel.kernels.memory_format import ChannelsLast, weights
from fewstep.accel.zoo.tiny import FAMILIES, tiny

CONVOLUTIONAL = [name for name, family in FAMILIES.items() if "unet" in family.tags] + ["sana"]


def layouts(pipe):
    parts = [p for p in pipe.components.values() if isinstance(p, torch.nn.Module)]
    return [(t.stride(), t.detach().clone()) for part in parts for t in part.parameters()]


@pytest.mark.parametrize("family", CONVOLUTIONAL)
def test_same_latents_and_exact_undo(family, outputs):
    options = {} if family == "ddpm" else {"output_type": "latent"}
    pipe = tiny(family)
    plain, before = outputs(pipe, family, **options), layouts(pipe)
    fast = AcceleratedPipeline(pipe, Recipe(ChannelsLast()))
    found = outputs(fast, family, **options)
    assert (found - plain).norm() <= 1e-4 * plain.norm()
    fast.detach()
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in zip(layouts(pipe), before, strict=True))
    assert torch.equal(outputs(pipe, family, **options), plain)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in CONVOLUTIONAL])
def test_refuses_where_only_patches_are_embedded(family):
    with pytest.raises(Unsupported, match="nothing to gain"):
        AcceleratedPipeline(tiny(family), Recipe(ChannelsLast()))


def test_contiguous_inputs_become_channels_last_by_themselves():
    """Which is why no input is converted: every convolution of UNet and decoder already meets NHWC, or makes it."""
    pipe, seen = tiny("sd"), []
    for part in (pipe.unet, pipe.vae.decoder):
        for module in part.modules():
            if isinstance(module, torch.nn.Conv2d) and max(module.kernel_size) > 1:
                module.register_forward_hook(lambda module, args, output: seen.append(output))
    AcceleratedPipeline(pipe, Recipe(ChannelsLast()))(**FAMILIES["sd"].call())
    assert len(seen) > 50
    assert all(output.is_contiguous(memory_format=torch.channels_last) for output in seen)


def test_three_dimensional_convolutions_too():
    pipe = tiny("animatediff")
    pipe.unet.extra = torch.nn.Conv3d(4, 8, 3)
    fast = AcceleratedPipeline(pipe, Recipe(ChannelsLast()))
    assert pipe.unet.extra.weight.is_contiguous(memory_format=torch.channels_last_3d)
    fast.detach()
    assert pipe.unet.extra.weight.is_contiguous()


def test_refuses_weights_that_are_kept_elsewhere():
    pipe = tiny("sd")
    pipe.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(Unsupported, match="enable_model_cpu_offload"):
        AcceleratedPipeline(pipe, Recipe(ChannelsLast()))


def test_strides_come_back_after_a_lora(outputs):
    pytest.importorskip("peft")
    from peft import LoraConfig

    pipe = tiny("sd")
    strides = [w.stride() for w in weights(pipe.unet)]
    fast = AcceleratedPipeline(pipe, Recipe(ChannelsLast()))
    fast.unet.add_adapter(LoraConfig(r=2, target_modules=["conv1", "to_q"]))
    outputs(fast, "sd")
    fast.detach()
    fast.unet.delete_adapters("default")
    bases = [w for name, w in pipe.unet.named_parameters() if w.ndim == 4 and "lora" not in name]
    assert [w.stride() for w in bases] == strides
