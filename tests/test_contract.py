"""The contract of every technique, over every family of pipelines.

`CASES` holds one row a technique: what it is tried as, where it must refuse, and what shows that it did its work. A
technique that the catalog lists and this table does not fails. The ordinary suite tries every technique on every family
for identity and detach, and each of the other checks on a family that rotates with the technique; `make test-all` tries
the full product.
"""

import atexit
import copy
import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    DDIMScheduler,
    DDPMScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
)

from fewstep import AcceleratedPipeline, Recipe, Unsupported
from fewstep.accel import catalog
from fewstep.accel.cache.attention import AttentionBroadcast
from fewstep.accel.cache.cross_attention import CrossAttentionCache
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.first_block import FirstBlockCache
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.cache.gate import CrossAttentionGate
from fewstep.accel.cache.modulated import TeaCache
from fewstep.accel.cache.text import TextCache
from fewstep.accel.decoder import TinyDecoder
from fewstep.accel.errors import InvalidRecipe
from fewstep.accel.kernels.compile import CompileBlocks
from fewstep.accel.kernels.memory_format import ChannelsLast
from fewstep.accel.kernels.precision import Bfloat16
from fewstep.accel.policy import Every
from fewstep.accel.run import Report
from fewstep.accel.solver import SwapScheduler
from fewstep.accel.technique import Fidelity, Technique
from fewstep.accel.zoo.tiny import FAMILIES, tiny

UNETS = frozenset(n for n, f in FAMILIES.items() if "unet" in f.tags)
TRANSFORMERS = frozenset(FAMILIES) - UNETS
JOINT = frozenset(
    {"sd3", "flux", "flux_img2img", "cogvideox", "qwen_image", "z_image"}
)  # text and image attend jointly
FLOW = frozenset({"sd3", "flux", "flux_img2img", "sana", "wan", "wan22", "qwen_image", "z_image"})
UNCODED = frozenset({"ddpm", "sana", "wan", "wan22", "cogvideox", "qwen_image"})  # no AutoencoderKL
# Their only convolution cuts patches.
PATCHED = JOINT | {"dit", "pixart", "wan", "wan22"}
WORDLESS = frozenset({"ddpm", "dit"})  # no text


@dataclass(frozen=True)
class Case:
    """`refuses`: families where `check` must raise. `acted`: whether the report of a second call shows its work."""

    technique: Technique
    refuses: frozenset[str]
    acted: Callable[[Report], bool]
    psnr: float = 0.0  # for Fidelity.PRECISION: the least, on the final latents
    options: dict = field(default_factory=dict)


def reused(name):
    return lambda report: report.counts[name]["reused"] > 0 and report.counts[name]["computed"] > 0


def small_decoder():
    """The folder of a small decoder for the tiny families' latents."""
    folder = tempfile.mkdtemp(prefix="fewstep-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoencoderTiny(
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            num_encoder_blocks=(0, 0),
            num_decoder_blocks=(1, 1),
        ).save_pretrained(folder)
    return folder


# Other backends have tests of their own; torch's aot_eager fails on a plain DDPM UNet at batch 1.
COMPILED = CompileBlocks(backend="eager")
CASES: dict[str, Case] = {
    "text_cache": Case(TextCache(), WORDLESS, lambda r: r.counts["text_cache"]["hits"] > 0),
    "cross_attention_cache": Case(
        CrossAttentionCache(), WORDLESS | JOINT, lambda r: r.counts["cross_attention_cache"]["reused"] > 0
    ),
    "deep_cache": Case(DeepCache(when=Every(2)), TRANSFORMERS, reused("deep_cache")),
    "first_block_cache": Case(
        FirstBlockCache(threshold=10.0, max_consecutive=1), frozenset(), reused("first_block_cache")
    ),
    "forecast": Case(Forecast(when=Every(2)), frozenset(), reused("forecast")),
    "attention_broadcast": Case(
        AttentionBroadcast(spatial=Every(2), cross=Every(2), temporal=Every(2)),
        frozenset(),
        reused("attention_broadcast"),
    ),
    # 10 is a noise level over signal: of a flow, whose share of noise is 1 at most, it is refused.
    "cross_attention_gate": Case(
        CrossAttentionGate(below=10.0), WORDLESS | JOINT | FLOW, reused("cross_attention_gate")
    ),
    "tea_cache": Case(TeaCache(threshold=10.0, max_consecutive=1), frozenset(), reused("tea_cache")),
    "swap_scheduler": Case(SwapScheduler("pndm"), FLOW | {"ddpm"}, lambda r: True),
    "tiny_decoder": Case(
        TinyDecoder(weights=small_decoder()), UNCODED, lambda r: r.counts["tiny_decoder"]["decoded"] > 0
    ),
    "channels_last": Case(ChannelsLast(), PATCHED, lambda r: True),
    "bfloat16": Case(Bfloat16(), frozenset(), lambda r: True, psnr=25.0),
    "compile_blocks": Case(COMPILED, frozenset(), lambda r: r.recompiles == 0),
}

NAMES = list(catalog.TECHNIQUES)
WORKING = [(n, f) for n, c in CASES.items() for f in FAMILIES if f not in c.refuses]
REFUSING = [(n, f) for n, c in CASES.items() for f in sorted(c.refuses)]
# Tracing a whole UNet takes ten seconds, so compiled blocks meet all families in the full product only.
QUICK = [(n, f) for n, f in WORKING if n != "compile_blocks" or f in ("sd", "flux", "pixart")]
PRODUCT = pytest.mark.parametrize(
    ("name", "family"), [pytest.param(*p, marks=[] if p in QUICK else [pytest.mark.slow]) for p in WORKING]
)


def rotating(check: int):
    """Each technique on one family in the ordinary suite, another a check; on all in the full product."""
    ordinary = set()
    for place, name in enumerate(NAMES):
        families = [f for n, f in QUICK if n == name]
        ordinary.add((name, families[(check * 5 + place * 3) % len(families)]))
    slow = [pytest.param(*pair, marks=[] if pair in ordinary else [pytest.mark.slow]) for pair in WORKING]
    return pytest.mark.parametrize(("name", "family"), slow)


def accelerated(name, family, seed=0, **options):
    return AcceleratedPipeline(tiny(family, seed), Recipe(CASES[name].technique), **options)


def modules(pipe):
    for part, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            for path, module in component.named_modules():
                yield f"{part}.{path}", module


def state(pipe):
    """Everything of the pipeline that a technique could have touched: attributes, addresses, strides and types."""
    attributes = {
        name: {k: id(v) if callable(v) else type(v) for k, v in vars(module).items()} for name, module in modules(pipe)
    }
    tensors = {
        f"{name}.{key}": (t.dtype, t.stride(), t.detach().clone())
        for name, module in modules(pipe)
        for key, t in [*module._parameters.items(), *module._buffers.items()]
        if t is not None
    }
    return attributes, tensors


def assert_same_state(found, expected):
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for key, (dtype, stride, value) in expected[1].items():
        assert found[1][key][:2] == (dtype, stride), key
        assert torch.equal(found[1][key][2], value), key


def assert_equal_to_class(found, plain, case):
    """The output against the plain pipeline's, to the technique's class."""
    fidelity = case.technique.fidelity
    if fidelity in (Fidelity.EXACT, Fidelity.LOSSY):  # asked of a lossy technique's identity only
        assert torch.equal(found, plain)
    elif fidelity is Fidelity.ROUNDING:
        assert (found.double() - plain.double()).norm() <= 1e-4 * plain.double().norm()
    elif fidelity is Fidelity.PRECISION:
        error = (found.double() - plain.double()).square().mean()
        assert -10 * torch.log10(error / plain.double().std() ** 2) >= case.psnr


def exacting(case):
    """What is held to equality: of a lossy technique its identity, any other as it is."""
    return case.technique.identity() if case.technique.fidelity is Fidelity.LOSSY else case.technique


def final(outputs, pipe, family, **changes):
    """The final latents where the pipeline gives them: pixels are rounded to bytes."""
    if family not in ("ddpm", "dit"):
        changes = {"output_type": "latent"} | changes
    return outputs(pipe, family, **changes)


def test_every_technique_has_a_row():
    assert set(CASES) == set(catalog.TECHNIQUES)
    assert all(catalog.technique(n).name == n for n in NAMES)


@PRODUCT
def test_identity_and_detach(name, family, outputs):
    """Equal to the plain pipeline to its class, twice; doing its work; then the plain pipeline again, exactly."""
    case, pipe = CASES[name], tiny(family)
    pixels = outputs(pipe, family)  # models keep what their first call made: a decoder's feature map, a recorder's hook
    plain, before = final(outputs, pipe, family), state(pipe)
    identity = case.technique.identity()
    fast = AcceleratedPipeline(pipe, Recipe(identity or case.technique))
    for _ in range(2):
        found = final(outputs, fast, family)
        if identity is not None:
            assert_equal_to_class(found, plain, case)
    if case.technique.fidelity is Fidelity.LOSSY:  # the identity does nothing: the setting must
        fast.detach()
        fast = AcceleratedPipeline(pipe, Recipe(case.technique))
        assert not torch.equal(outputs(fast, family), pixels)
    assert case.acted(fast.run(**FAMILIES[family].call()).report)
    assert fast.detach() is pipe
    assert_same_state(state(pipe), before)
    assert torch.equal(final(outputs, pipe, family), plain)


@pytest.mark.parametrize(("name", "family"), REFUSING)
def test_it_refuses_in_words_and_touches_nothing(name, family):
    pipe = tiny(family)
    before = state(pipe)
    with pytest.raises(Unsupported, match=r"\w+ \w+ \w+") as refusal:
        AcceleratedPipeline(pipe, Recipe(CASES[name].technique))
    assert len(str(refusal.value)) > 30
    assert_same_state(state(pipe), before)


@rotating(1)
def test_failure_half_way_restores(name, family, monkeypatch):
    """The n-th change fails, for every n: nothing stays behind."""
    from fewstep.accel.patches import Patches

    pipe = tiny(family)
    before = state(pipe)
    changes = ("wrap_method", "set_attr", "set_data", "set_strides", "replace_module", "on_undo")
    for allowed in range(3):
        left = [allowed]
        with monkeypatch.context() as patch:
            for change in changes:
                patch.setattr(Patches, change, failing(getattr(Patches, change), left))
            with pytest.raises(ArithmeticError):
                AcceleratedPipeline(pipe, Recipe(CASES[name].technique))
        assert_same_state(state(pipe), before)


def failing(method, left):
    def change(self, *args, **kwargs):
        if left[0] == 0:
            raise ArithmeticError("injected")
        left[0] -= 1
        return method(self, *args, **kwargs)

    return change


@rotating(2)
def test_a_call_does_not_depend_on_the_ones_before(name, family, outputs):
    """Other steps, another prompt, a call that raised: each leaves the next one as if it were the first."""
    fresh = final(outputs, accelerated(name, family), family)
    fast = accelerated(name, family)

    def stop(pipe, step, timestep, kwargs):
        raise ArithmeticError("stop")

    final(outputs, fast, family, num_inference_steps=2, seed=5)
    assert torch.equal(final(outputs, fast, family), fresh)
    if family not in ("ddpm", "dit"):
        final(outputs, fast, family, prompt="another one, longer than the first")
        if family not in ("sd_instruct_pix2pix", "pixart", "sana"):  # their callback has another shape, or none
            with pytest.raises(ArithmeticError):
                final(outputs, fast, family, callback_on_step_end=stop)
    assert torch.equal(final(outputs, fast, family), fresh)


@rotating(3)
def test_another_size_and_batch_in_between(name, family, outputs):
    fresh = final(outputs, accelerated(name, family), family)
    fast = accelerated(name, family)
    call = FAMILIES[family].call()
    if "height" in call:
        final(outputs, fast, family, height=call["height"] * 2, width=call["width"] * 2)
    if family not in WORDLESS and not FAMILIES[family].tags & {"video", "image_input"}:
        final(outputs, fast, family, num_images_per_prompt=2)
    assert torch.equal(final(outputs, fast, family), fresh)


@rotating(4)
def test_an_image_does_not_depend_on_its_batch_mates(name, family, outputs):
    """Image 0 beside two different mates: the same bits."""
    if family in WORDLESS or "image_input" in FAMILIES[family].tags:
        pytest.skip("no list of prompts in this family's call")
    call = FAMILIES[family].call()
    shared = {"prompt": None, "negative_prompt": [""] * 2 if "negative_prompt" in call else None}
    shared = {k: v for k, v in shared.items() if k in call}
    fast = accelerated(name, family)

    def first(mate):
        rng = [torch.Generator().manual_seed(i) for i in (7, mate)]
        return final(outputs, fast, family, **shared | {"prompt": ["a red fox", "word " * mate], "generator": rng})[0]

    assert torch.equal(first(1), first(3)) or family in ("qwen_image", "z_image")  # padded to their longest prompt


@rotating(5)
def test_guidance_off_and_on(name, family, outputs):
    off = FAMILIES[family].off
    if not off:
        pytest.skip("this family has no guidance to switch off")
    case, pipe = CASES[name], tiny(family)
    plain_off, plain_on = final(outputs, pipe, family, **off), final(outputs, pipe, family)
    fast = AcceleratedPipeline(pipe, Recipe(case.technique))
    found = [final(outputs, fast, family, **off), final(outputs, fast, family), final(outputs, fast, family, **off)]
    assert torch.equal(found[0], found[2])
    if case.technique.identity() is not None:
        fast.detach()
        fast = AcceleratedPipeline(pipe, Recipe(exacting(case)))
        assert_equal_to_class(final(outputs, fast, family, **off), plain_off, case)
        assert_equal_to_class(final(outputs, fast, family), plain_on, case)


@pytest.mark.parametrize("name", NAMES)
def test_guidance_switched_off_mid_run(name, outputs):
    def switch(pipe, step, timestep, kwargs):
        if step == 0:
            pipe._guidance_scale = 0.0
            kwargs["prompt_embeds"] = kwargs["prompt_embeds"].chunk(2)[1]
        return kwargs

    case, pipe = CASES[name], tiny("sd")
    options = {"callback_on_step_end": switch, "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    plain = final(outputs, pipe, "sd", **options)
    fast = AcceleratedPipeline(pipe, Recipe(case.technique))
    found = final(outputs, fast, "sd", **options)
    assert torch.equal(final(outputs, fast, "sd", **options), found)
    if case.technique.identity() is not None:
        fast.detach()
        fast = AcceleratedPipeline(pipe, Recipe(exacting(case)))
        assert_equal_to_class(final(outputs, fast, "sd", **options), plain, case)


SAMPLERS = [
    (DDIMScheduler, {"eta": 1.0}),
    (EulerAncestralDiscreteScheduler, {}),
    (LCMScheduler, {}),
    (DDPMScheduler, {}),
    (HeunDiscreteScheduler, {}),
]


SAMPLED = [
    pytest.param(n, *sampler, marks=[pytest.mark.slow] if n == "compile_blocks" and place else [])
    for n in NAMES
    if CASES[n].technique.identity() is not None
    for place, sampler in enumerate(SAMPLERS)
]


@pytest.mark.parametrize(("name", "sampler", "options"), SAMPLED)
def test_stochastic_and_second_order_samplers(name, sampler, options, outputs):
    case, pipe = CASES[name], tiny("sd")
    pipe.scheduler = sampler.from_config(pipe.scheduler.config)
    plain = final(outputs, pipe, "sd", **options)
    fast = AcceleratedPipeline(pipe, Recipe(exacting(case)))
    assert_equal_to_class(final(outputs, fast, "sd", **options), plain, case)


@rotating(6)
def test_two_threads_equal_each_alone(name, family, outputs):
    if family == "sd_pag":
        pytest.skip("calls of this family are exclusive, and refused in words")
    fast = accelerated(name, family)
    jobs = [{"seed": i, "num_inference_steps": 2 + i} for i in range(2)]
    alone, together = [final(outputs, fast, family, **job) for job in jobs], [None, None]

    def work(i):
        together[i] = final(outputs, fast, family, **jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@rotating(7)
@pytest.mark.parametrize("when", ["before", "after"])
def test_offload_before_and_after(name, family, when, outputs):
    """Three calls each: diffusers takes its hooks off and puts them back at the end of every call."""
    pipe = tiny(family)
    if pipe.model_cpu_offload_seq is None:
        pytest.skip("diffusers offers no offload for this family")
    expected = final(outputs, accelerated(name, family), family)
    if when == "before":
        pipe.enable_model_cpu_offload(device="cpu")
    fast = AcceleratedPipeline(pipe, Recipe(CASES[name].technique))
    if when == "after":
        fast.enable_model_cpu_offload(device="cpu")
    for _ in range(3):
        assert torch.equal(final(outputs, fast, family), expected)


@rotating(8)
def test_save_and_load(name, family, outputs, tmp_path):
    """The folder carries the recipe, and stock diffusers loads it with its own scheduler."""
    fast = accelerated(name, family)
    expected, stock = final(outputs, fast, family), type(fast.attachment.pipe.scheduler)
    fast.save_pretrained(tmp_path)
    again = AcceleratedPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.recipe == fast.recipe
    assert type(again.attachment.pipe.scheduler) is stock
    assert torch.equal(final(outputs, again, family), expected)
    assert torch.equal(final(outputs, fast, family), expected)


@pytest.mark.parametrize("name", NAMES)
def test_under_compiled_blocks(name, outputs):
    case, pipe = CASES[name], tiny("sd")
    alone = final(outputs, AcceleratedPipeline(copy.deepcopy(pipe), Recipe(case.technique)), "sd")
    both = Recipe(*{case.technique, COMPILED})
    found = final(outputs, AcceleratedPipeline(pipe, both), "sd")
    tolerance = 5e-2 if case.technique.fidelity is Fidelity.PRECISION else 1e-4
    assert (found - alone).norm() <= tolerance * alone.norm()


PAIRS = list(itertools.combinations(NAMES, 2))


@pytest.mark.parametrize(
    ("pair", "family"), [(p, ["sd", "sdxl", "pixart", "sd_controlnet"][i % 4]) for i, p in enumerate(PAIRS)]
)
def test_pairs_compose(pair, family, outputs):
    """Two together equal the coarser one alone (of two lossy ones nobody knows what they equal), and come off together;
    two owners of one seam are refused."""
    cases, pipe = [CASES[n] for n in pair], tiny(family)
    if cases[0].technique.claims & cases[1].technique.claims:
        with pytest.raises(InvalidRecipe, match="both own"):
            Recipe(*(c.technique for c in cases))
        return
    if any(family in case.refuses for case in cases):
        pytest.skip("one of the pair refuses this family")
    outputs(pipe, family)
    before = state(pipe)
    cases.sort(key=lambda c: list(Fidelity).index(c.technique.fidelity))
    coarse = final(outputs, accelerated(cases[1].technique.name, family), family)
    fast = AcceleratedPipeline(pipe, Recipe(*(c.technique for c in cases)))
    assert torch.equal(final(outputs, fast, family), found := final(outputs, fast, family))
    tolerance = 5e-2 if Fidelity.PRECISION in {c.technique.fidelity for c in cases} else 1e-4
    assert found.isfinite().all()
    if not all(c.technique.fidelity is Fidelity.LOSSY for c in cases):
        assert (found.double() - coarse.double()).norm() <= tolerance * coarse.double().norm()
    fast.detach()
    assert_same_state(state(pipe), before)
