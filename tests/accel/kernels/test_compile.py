"""CompileBlocks: which regions are compiled, how often, and that nothing of it is met outside its calls."""

import inspect
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from accelerate import hooks as accelerate_hooks
from diffusers import DiTTransformer2DModel, UNet2DConditionModel
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

from fewstep import AcceleratedPipeline, Recipe, Unsupported, accelerate, release, run
from fewstep.accel.cache import reuse
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.kernels import compile as compiling
from fewstep.accel.kernels.compile import CompileBlocks, regions, repeated
from fewstep.accel.kernels.memory_format import ChannelsLast
from fewstep.accel.kernels.precision import Bfloat16
from fewstep.accel.patches import Dispatcher, Patches
from fewstep.accel.run import open_run
from fewstep.accel.technique import Fidelity, Stage, Technique
from fewstep.accel.zoo.tiny import FAMILIES, tiny

EAGER = CompileBlocks(backend="eager")  # traces and guards as any backend, and computes the same bits


@pytest.fixture(autouse=True)
def fresh():
    """torch remembers which sizes were seen to change, by source line."""
    torch._dynamo.reset()


@dataclass(frozen=True, kw_only=True)
class Spy(Technique):
    """Stands around the modules of one class, as a cache does, and leaves through the Run."""

    name = "spy"
    stage = Stage.CACHE
    fidelity = Fidelity.EXACT
    kind: str = "BasicTransformerBlock"

    def apply(self, target, patches):
        for module in target.denoiser.modules():
            if type(module).__name__ == self.kind:
                patches.wrap_forward(module, self.around)

    def around(self, inner, *args, **kwargs):
        open_run().count("spy", "calls")
        return inner(*args, **kwargs)


def compiled(fast, family, **changes):
    return fast.run(**FAMILIES[family].call() | changes).report.recompiles


def small(seed=0):
    """Stable Diffusion with a UNet of one level, traced in a second."""
    pipe = tiny("sd", seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"sample_size": 16, "block_out_channels": (16,), "layers_per_block": 1, "cross_attention_dim": 32}
        kinds = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
        pipe.unet = UNet2DConditionModel(attention_head_dim=4, norm_num_groups=4, **sizes, **kinds).eval()
    return pipe


def regions_of(fast):
    patches = fast.attachment.patches
    return [d.owner for d in patches._dispatchers if fast.attachment in d.cores]


@pytest.mark.parametrize("family", ["sd", "dit", "pixart", "flux", "sana", "wan22", "qwen_image", "z_image"])
def test_same_bits_and_no_second_compilation(family, outputs):
    pipe = tiny(family)
    plain = outputs(pipe, family)
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    assert compiled(fast, family) > 0
    assert compiled(fast, family) == 0
    assert torch.equal(outputs(fast, family), plain)
    fast.detach()
    assert torch.equal(outputs(pipe, family), plain)
    parts = [p for p in pipe.components.values() if isinstance(p, torch.nn.Module)]
    assert not any("forward" in vars(module) for part in parts for module in part.modules())


def test_a_unet_is_one_region_and_one_graph():
    fast = AcceleratedPipeline(small(), Recipe(EAGER))
    assert regions_of(fast) == [fast.unet]
    assert compiled(fast, "sd") == 1


def test_equal_blocks_share_graphs():
    """One for five blocks, though the patch embedding gives the first one transposed strides."""
    model = DiTTransformer2DModel(num_layers=5, num_attention_heads=2, attention_head_dim=8, sample_size=16).eval()
    accelerate(model, Recipe(EAGER))
    with run() as state, torch.no_grad():
        model(torch.randn(2, 4, 16, 16), torch.tensor([3, 3]), torch.tensor([1, 1000]))
    release(model)
    assert state.report.recompiles == 1


@pytest.mark.parametrize("kind", ["BasicTransformerBlock", "CrossAttnUpBlock2D"])
def test_wrappers_stay_outside_the_regions(kind, outputs):
    """No region holds a wrapper, every wrapper is called, and what is compiled covers the convolutions."""
    pipe = small()
    plain = outputs(pipe, "sd")
    fast = AcceleratedPipeline(pipe, Recipe(EAGER, Spy(kind=kind)))
    chosen, patches = regions_of(fast), fast.attachment.patches
    assert not any(patches.wrapped(part) for region in chosen for part in region.children())
    wrapped = [m for m in pipe.unet.modules() if type(m).__name__ == kind]
    report = fast.run(**FAMILIES["sd"].call()).report
    assert report.counts["spy"]["calls"] == 3 * len(wrapped)
    assert report.recompiles > 0 and not report.notes
    assert torch.equal(outputs(fast, "sd"), plain)
    assert all(any(m in set(region.modules()) for region in chosen) for m in wrapped)
    assert compiled(fast, "sd") == 0


def test_another_batch_size_and_step_count(outputs):
    """Right for all; sizes become dynamic after the second of them, so that a third compiles nothing."""
    pipe = small()
    changes = [{}, {"height": 64, "width": 64}, {"num_images_per_prompt": 2}, {"num_inference_steps": 5}]
    plain = [outputs(pipe, "sd", **change) for change in changes]
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    assert all(torch.equal(outputs(fast, "sd", **c), p) for c, p in zip(changes, plain, strict=True))
    assert [compiled(fast, "sd", **change) for change in changes] == [0] * 4
    assert compiled(fast, "sd", height=96, width=128) == 0


def test_a_bare_call_and_a_sibling_stay_eager():
    pipe, x, text = small(), torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    sibling = type(pipe)(**pipe.components, requires_safety_checker=False)
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    seen = []
    pipe.unet.mid_block.register_forward_hook(lambda *_: seen.append(torch.compiler.is_compiling()))
    with torch.no_grad(), pytest.warns(UserWarning, match="runs plain"):
        pipe.unet(x, 3, text)
    sibling(**FAMILIES["sd"].call())
    assert seen == [False] * 4
    fast(**FAMILIES["sd"].call())
    assert True in seen[4:]


def test_a_sibling_that_wraps_later_is_not_traced(outputs):
    pipe = small()
    plain = outputs(pipe, "sd")
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    other = AcceleratedPipeline(type(pipe)(**pipe.components, requires_safety_checker=False), Recipe(Spy()))
    report = fast.run(**FAMILIES["sd"].call()).report
    assert report.recompiles == 0 and "ran uncompiled" in report.notes[0]
    assert torch.equal(outputs(fast, "sd"), plain)
    other.detach()
    assert compiled(fast, "sd") == 1


def test_graphs_go_with_the_attachment_and_the_users_own_stay():
    pipe, x, text = small(), torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    graphs = []

    def mine(graph, inputs):
        graphs.append(graph)
        return graph

    own = torch.compile(small(1).unet.forward, backend=mine)
    with torch.no_grad():
        own(x, 3, text)
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    assert compiled(fast, "sd") == 1
    dispatcher = next(d for d in fast.attachment.patches._dispatchers if d.cores)
    held = inspect.getclosurevars(dispatcher.cores[fast.attachment].func).nonlocals
    code = held["compiled"]._torchdynamo_orig_callable.__code__
    assert len(_debug_get_cache_entry_list(code)) == 1
    fast.detach()
    assert not _debug_get_cache_entry_list(code)
    with torch.no_grad():
        own(x, 3, text)
    assert len(graphs) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_model_offload(when, outputs):
    pipe = small()
    plain = outputs(pipe, "sd")
    if when == "before":
        pipe.enable_model_cpu_offload(device="cpu")
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    if when == "after":
        fast.enable_model_cpu_offload(device="cpu")
    assert [compiled(fast, "sd") for _ in range(3)] == [1, 0, 0]
    assert torch.equal(outputs(fast, "sd"), plain)
    fast.detach()
    assert torch.equal(outputs(pipe, "sd"), plain)


def test_offload_leaf_by_leaf_is_refused_before_and_noted_after(outputs):
    pipe = small()
    plain = outputs(pipe, "sd")
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    accelerate_hooks.add_hook_to_module(pipe.unet.mid_block, accelerate_hooks.ModelHook())
    report = fast.run(**FAMILIES["sd"].call()).report
    assert report.recompiles == 0 and "offload" in report.notes[0]
    assert torch.equal(outputs(fast, "sd"), plain)
    fast.detach()
    with pytest.raises(Unsupported, match="enable_model_cpu_offload"):
        AcceleratedPipeline(pipe, Recipe(EAGER))


def test_refuses_what_cannot_compile(monkeypatch):
    with pytest.raises(Unsupported, match=r"it has: .*inductor"):
        AcceleratedPipeline(small(), Recipe(CompileBlocks(backend="nonesuch")))
    monkeypatch.setattr(torch._inductor.cpp_builder, "get_cpp_compiler", lambda: 1 / 0)
    with pytest.raises(Unsupported, match=r"install g\+\+"):
        AcceleratedPipeline(small(), Recipe(CompileBlocks()))


def test_a_lora_loaded_afterwards(outputs):
    pytest.importorskip("peft")
    from peft import LoraConfig

    pipe, plain_pipe = small(), small()
    fast = AcceleratedPipeline(pipe, Recipe(EAGER))
    assert compiled(fast, "sd") == 1
    for each in (fast, plain_pipe):
        torch.manual_seed(0)
        each.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    assert torch.equal(outputs(fast, "sd"), outputs(plain_pipe, "sd"))
    assert compiled(fast, "sd") == 0
    scaled = {"cross_attention_kwargs": {"scale": 0.5}}
    assert torch.equal(outputs(fast, "sd", **scaled), outputs(plain_pipe, "sd", **scaled))
    assert torch.equal(outputs(fast, "sd"), outputs(plain_pipe, "sd"))


def test_another_attention_processor_is_seen():
    """Nothing that a user may change on the model is left out of the guards."""
    from diffusers.models.attention_processor import AttnProcessor

    fast = AcceleratedPipeline(small(), Recipe(EAGER))
    assert compiled(fast, "sd") == 1
    fast.unet.set_attn_processor(AttnProcessor())
    assert compiled(fast, "sd") == 1


def test_own_loop():
    pipe, x, text = small(), torch.randn(2, 4, 16, 16), torch.randn(2, 5, 32)
    with torch.no_grad():
        plain = pipe.unet(x, 3, text).sample
        accelerate(pipe.unet, Recipe(EAGER))
        with run() as state:
            assert torch.equal(pipe.unet(x, 3, text).sample, plain)
        assert state.report.recompiles == 1
        release(pipe.unet)
        assert torch.equal(pipe.unet(x, 3, text).sample, plain)


def test_other_kernels_beneath_it(outputs):
    pipe, recipe = small(), (ChannelsLast(), Bfloat16())
    alone = AcceleratedPipeline(pipe, Recipe(*recipe))
    expected = outputs(alone, "sd")
    alone.detach()
    fast = AcceleratedPipeline(pipe, Recipe(*recipe, EAGER))
    assert [compiled(fast, "sd"), compiled(fast, "sd")] == [1, 0]
    assert torch.equal(outputs(fast, "sd"), expected)


def test_blocks_that_are_alike():
    flux = tiny("flux").transformer
    assert repeated(flux) == [*flux.transformer_blocks, *flux.single_transformer_blocks]
    assert repeated(tiny("sd").unet) == repeated(tiny("ddpm").unet) == []


def test_a_region_has_parts_and_a_forward():
    pipe, patches = small(), Patches(object())
    patches.wrap_forward(pipe.unet.mid_block, lambda inner, *args, **kwargs: inner(*args, **kwargs))
    found = list(regions(pipe.unet, patches))
    assert pipe.unet.mid_block in found and pipe.unet not in found
    assert not any(isinstance(m, torch.nn.ModuleList) or not list(m.children()) for m in found)
    patches.undo()
    assert not isinstance(pipe.unet.mid_block.forward, Dispatcher)


def test_inductor_on_one_block():
    """The real compiler, on the smallest network that has a block."""
    compiling.need_toolchain(torch.device("cpu"))
    pipe = tiny("dit")
    x, text = torch.randn(2, 4, 16, 16), torch.tensor([1, 1000])
    with torch.no_grad():
        plain = pipe.transformer(x, torch.tensor([3, 3]), text).sample
        accelerate(pipe.transformer, Recipe(CompileBlocks()))
        with run() as state:
            found = [pipe.transformer(x, torch.tensor([3, 3]), text).sample for _ in range(2)]
        release(pipe.transformer)
    assert state.report.recompiles == 1
    assert all((f - plain).norm() <= 1e-5 * plain.norm() for f in found)


@pytest.mark.parametrize("family", ["pixart", "flux"])
def test_rows_that_decide_differently_cost_three_graphs_a_block_at_most(family, monkeypatch):
    """Whatever number of rows goes on after the probe: one graph for the first, one for any, one for a single row."""
    made, function = [], compiling.types.FunctionType

    def recorded(*args):
        made.append(function(*args))
        return made[-1]

    monkeypatch.setattr(compiling, "types", SimpleNamespace(FunctionType=recorded))
    fast = AcceleratedPipeline(tiny(family), Recipe(FirstBlockCache(threshold=0.2), EAGER))
    mixed, grouped = [], reuse.in_groups
    monkeypatch.setattr(reuse, "in_groups", lambda *args: mixed.append(1) or grouped(*args))
    for count in (4, 3, 2, 1, 4):
        prompts = ["a red fox", "two blue cubes", "sand", "a tree"][:count]
        call = FAMILIES[family].call() | {"prompt": prompts, "num_inference_steps": 6}
        call |= (
            {"negative_prompt": None, "true_cfg_scale": 1.0} if family == "flux" else {"negative_prompt": [""] * count}
        )
        report = fast.run(**call).report
    graphs = {f.__qualname__: len(_debug_get_cache_entry_list(f.__code__)) for f in made}
    assert graphs and all(1 <= n <= 3 for n in graphs.values()), graphs
    assert report.recompiles == 0
    assert mixed or family == "flux", "all rows decided alike: nothing was proved"
