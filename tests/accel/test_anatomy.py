"""The tables of anatomy.py against diffusers itself: what its pipelines do when called, and what its sources say."""

import re
from functools import cache
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from torch import nn

from fewstep.accel import anatomy
from fewstep.accel.anatomy import (
    BRANCHES,
    CROSS_ATTENTION,
    IRREGULAR,
    ROW_ARGS,
    branches,
    cross_attention,
    decoders,
    denoisers,
    rows_of,
    take_rows,
    text_encoders,
)
from fewstep.accel.errors import Unsupported
from fewstep.accel.zoo.tiny import FAMILIES, tiny

NAMES = list(FAMILIES)
GUIDED = [name for name, family in FAMILIES.items() if "cfg" in family.tags]
TEXT = ("encoder_hidden_states", "cap_feats", "class_labels")
pipeline = cache(tiny)


def _calls(name: str, step: int = 0, **changes) -> list[tuple[nn.Module, tuple, dict]]:
    """The denoiser calls of one step of the family's call."""
    pipe, seen = pipeline(name), []

    def note(module, args, kwargs):
        seen.append((module, args, kwargs))

    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in denoisers(pipe).values()]
    with torch.no_grad():
        pipe(**{**FAMILIES[name].call(), **changes})
    for handle in handles:
        handle.remove()
    times = [min(_named(*call, "timestep", "t")) for call in seen]
    return [call for call, time in zip(seen, times, strict=True) if time == list(dict.fromkeys(times))[step]]


def _named(module, args, kwargs, *names):
    """The argument of a call that has one of these names, as something that can be compared."""
    given = dict(zip(anatomy._parameters(type(module)), args, strict=False)) | kwargs
    value = next((given[name] for name in names if name in given), None)
    value = value[0] if isinstance(value, list) else value
    return value.flatten().tolist() if isinstance(value, torch.Tensor) else value


def _row_texts(call) -> list:
    module, args, kwargs = call
    rows = range(rows_of(module, args, kwargs))
    return [_named(module, *take_rows(module, args, kwargs, torch.tensor([row])), *TEXT) for row in rows]


def _pair(name: str, second: str = "a red fox", negative: str = "blurry") -> dict:
    """Two images a call, of which the second differs. All texts of one length, so that rows can be compared."""
    call = FAMILIES[name].call()
    if "class_labels" in call:
        return {"class_labels": [1, 0 if second != "a red fox" else 1]}
    return {"prompt": ["a red fox", second], "negative_prompt": ["blurry", negative]}


def _changed(one: list, other: list) -> list[int]:
    return [row for row, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


# ------------------------------------------------------------------------------------------------- branches


@pytest.mark.parametrize("name", GUIDED)
def test_branches_are_where_the_pipeline_puts_the_prompts(name):
    base, prompt, negative = (
        [_row_texts(call) for call in _calls(name, **_pair(name, **change))]
        for change in ({}, {"second": "a tan cat"}, {"negative": "smudgy"})
    )
    for number, texts in enumerate(base):
        found = branches(pipeline(name), len(texts) // 2, number)
        assert found and len(found) * 2 == len(texts)
        reads_prompt = [2 * i + 1 for i, branch in enumerate(found) if branch in ("cond", "perturbed")]
        reads_negative = [2 * i + 1 for i, branch in enumerate(found) if branch in ("uncond", "image")]
        assert _changed(texts, prompt[number]) == reads_prompt
        if "class" not in FAMILIES[name].tags:
            assert _changed(texts, negative[number]) == reads_negative
    assert {branch for i, texts in enumerate(base) for branch in branches(pipeline(name), len(texts) // 2, i)} >= {
        "cond",
        "uncond",
    }


@pytest.mark.parametrize("name", NAMES)
def test_without_guidance_one_call_of_the_prompt_alone(name):
    calls = _calls(name, **FAMILIES[name].off)
    assert len(calls) == 1 and rows_of(*calls[0]) == 1
    assert branches(pipeline(name), 1) == ("cond",)


def test_pix2pix_tells_the_image_branch_from_the_unconditional():
    (call,) = _calls("sd_instruct_pix2pix")
    image = call[1][0][:, 4:]
    with_image = [bool(image[row].any()) for row in range(3)]
    assert branches(pipeline("sd_instruct_pix2pix"), 3) == ("cond", "image", "uncond")
    assert with_image == [True, True, False]


def test_pag_pair_depends_on_the_call():
    pipe = tiny("sd_pag")
    for kwargs, expected in (
        ({"guidance_scale": 1.0, "pag_scale": 2.0}, ("cond", "perturbed")),
        ({"guidance_scale": 4.0, "pag_scale": 0.0}, ("uncond", "cond")),
        ({"guidance_scale": 4.0, "pag_scale": 2.0}, ("uncond", "cond", "perturbed")),
    ):
        pipe(**{**FAMILIES["sd_pag"].call(), **kwargs})
        assert branches(pipe, len(expected)) == expected


def test_contexts_name_the_branch_that_the_call_holds():
    """Wan and Qwen-Image open a context around each call: it must agree with the order of calls."""
    for name in ("wan", "qwen_image", "flux"):
        pipe, opened = pipeline(name), []
        original = type(pipe.transformer).cache_context

        def noted(self, context, *args, original=original, opened=opened, **kwargs):
            opened.append(context)
            return original(self, context, *args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(pipe.transformer), "cache_context", noted)
            pipe(**FAMILIES[name].call())
        expected = [branches(pipe, 1, call)[0] for call in (0, 1)] * 3
        assert [anatomy.CONTEXTS[context] for context in opened] == expected


def test_subclass_is_known_unless_it_has_a_loop_of_its_own():
    base = type(pipeline("sd"))
    same = type("Mine", (base,), {})
    other = type("Other", (base,), {"__call__": lambda self: None})
    ours = type("Ours", (base,), {"__call__": lambda self: None, "__module__": "fewstep.accel.pipeline"})
    known = [anatomy._guidance(cls) is BRANCHES["StableDiffusionPipeline"] for cls in (same, other, ours)]
    assert known == [True, False, True]
    assert branches(object(), 2) is None
    assert branches(pipeline("sd"), 5) is None


def test_third_kind_of_call_in_stable_diffusion_3():
    skipping = {"skip_guidance_layers": [0], "skip_layer_guidance_start": 0.0, "skip_layer_guidance_stop": 1.0}
    base, other = (
        [_row_texts(call) for call in _calls("sd3", step=1, **_pair("sd3", second), **skipping)]
        for second in ("a red fox", "a tan cat")
    )
    found = [branches(pipeline("sd3"), len(texts) // 2, number) for number, texts in enumerate(base)]
    assert found == [("uncond", "cond"), ("perturbed",)]
    assert [_changed(*texts) for texts in zip(base, other, strict=True)] == [[3], [1]]


CLASS = re.compile(r"^class (\w+)(.*?)(?=^[\w@#]|\Z)", re.M | re.S)


@cache
def _sources() -> dict[str, str]:
    """Every pipeline of diffusers that can be called, with its source."""
    texts = [path.read_text() for path in (Path(diffusers.__file__).parent / "pipelines").rglob("*.py")]
    found = {block[0]: block[1] for text in texts for block in re.findall(CLASS, text)}
    callable_ = {name: source for name, source in found.items() if "\n    def __call__(" in source}
    return {name: source for name, source in callable_.items() if "Pipeline" in name and "Onnx" not in name}


def test_every_pipeline_of_diffusers_is_placed():
    """A pipeline that a new diffusers brings must be read before it is trusted."""
    assert not _sources().keys() - BRANCHES.keys() - IRREGULAR
    assert not BRANCHES.keys() & IRREGULAR


SPLIT = re.compile(r"^ *([\w, ]+), (\w+) = (?:\w+\.chunk|torch\.split)\(", re.M)
CALL = re.compile(r"^ *(\w+) = (?:self\.(?:unconditional_)?transformer|current_model)\(", re.M)
SPELLING = (("uncond|neg_|_neg|null", "uncond"), ("perturb", "perturbed"), ("image$|img", "image"), ("", "cond"))
# Cosmos calls once per branch and only then joins the two; the other two name branches in a way of their own.
SPELT_OTHERWISE = {"CosmosTextToWorldPipeline", "CosmosVideoToWorldPipeline", "CycleDiffusionPipeline"}


def _meaning(name: str) -> str:
    return next(word for spelt, word in SPELLING if re.search(spelt, name))


def _named_orders(source: str) -> set[tuple[str, ...]]:
    """The orders in which a pipeline takes its prediction apart, by the names that it gives the parts."""
    splits = ([*first.replace(" ", "").split(","), last] for first, last in SPLIT.findall(source))
    orders = {tuple(map(_meaning, names)) for names in splits if not any("embeds" in name for name in names)}
    return {order for order in orders if "uncond" in order}


def test_order_is_the_one_in_which_pipelines_take_their_predictions_apart():
    checked = set()
    for name in BRANCHES.keys() & _sources().keys() - SPELT_OTHERWISE:
        for order in _named_orders(_sources()[name]):
            expected = BRANCHES[name].batched[len(order)]
            assert callable(expected) or order == expected, name
            checked.add(name)
    assert len(checked) > 150


def test_order_of_calls_is_the_one_in_which_pipelines_name_their_results():
    checked = 0
    for name in BRANCHES.keys() & _sources().keys():
        calls = tuple(map(_meaning, CALL.findall(_sources()[name])))
        if BRANCHES[name].calls == ("cond", "uncond") and len(calls) > 1:
            assert calls == ("cond", "uncond"), name
            checked += 1
    assert checked > 50


# ------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("name", NAMES)
def test_taken_rows_give_the_rows_of_the_full_call(name):
    if name == "sd_pag":
        pytest.skip("its attention processors split the batch in three, so that rows depend on each other")
    two = {"batch_size": 2} if name == "ddpm" else _pair(name, "a tan cat", "smudgy")
    for module, args, kwargs in _calls(name, **two):
        rows = rows_of(module, args, kwargs)
        assert rows % 2 == 0
        full = _prediction(module, args, kwargs)
        for index in ([rows - 1], [1, 0], [0, 0, rows - 1]):
            taken = take_rows(module, args, kwargs, torch.tensor(index))
            assert rows_of(module, *taken) == len(index)
            assert torch.allclose(_prediction(module, *taken), full[index], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def _prediction(module, args, kwargs) -> torch.Tensor:
    output = module(*args, **kwargs)[0]
    return torch.stack(output) if isinstance(output, list) else output


def test_rows_with_prompts_of_different_length_in_lists():
    (call,) = _calls("z_image", prompt=["a", "a red fox in the snow"], negative_prompt=["", "blurry"])
    module, args, kwargs = call
    taken = take_rows(module, args, kwargs, torch.tensor([1, 3]))
    assert torch.allclose(_prediction(module, *taken), _prediction(*call)[[1, 3]], atol=1e-5, rtol=1e-4)


def test_rows_of_several_images_a_prompt():
    (call, *_) = _calls("qwen_image", num_images_per_prompt=3)
    module, args, kwargs = call
    assert rows_of(*call) == 3 > len(kwargs["img_shapes"])
    taken = take_rows(module, args, kwargs, torch.tensor([2, 1]))
    assert torch.allclose(_prediction(module, *taken), _prediction(*call)[[2, 1]], atol=1e-5, rtol=1e-4)


def test_shared_and_nested_arguments():
    flux = pipeline("flux").transformer
    ids, latents, nested = torch.zeros(2, 3), torch.arange(2.0)[:, None], {"ip": [torch.arange(2.0)], "scale": 0.5}
    kwargs = {"img_ids": ids, "guidance": torch.ones(1), "joint_attention_kwargs": nested}
    args, taken = take_rows(flux, (latents,), kwargs, torch.tensor([1]))
    assert args[0].tolist() == [[1.0]]
    assert taken["img_ids"] is ids and taken["guidance"].shape == (1,)
    assert taken["joint_attention_kwargs"]["ip"][0].tolist() == [1.0]
    assert taken["joint_attention_kwargs"]["scale"] == 0.5


def test_wan_timestep_per_row_and_per_token():
    wan, sample = pipeline("wan").transformer, torch.zeros(2, 4, 1, 2, 2)
    for timestep in (torch.arange(2.0), torch.arange(6.0).view(2, 3), torch.tensor(7.0)):
        _, taken = take_rows(wan, (sample,), {"timestep": timestep}, torch.tensor([1]))
        assert torch.equal(taken["timestep"], timestep[[1]] if timestep.ndim else timestep)


def test_arguments_without_rows_and_unknown_classes_are_refused():
    unet, sample = pipeline("sd").unet, torch.zeros(2, 4, 8, 8)
    with pytest.raises(Unsupported, match=r"encoder_hidden_states\) has 3 entries in dimension 0 for 2 rows"):
        take_rows(unet, (sample,), {"encoder_hidden_states": torch.zeros(3, 1, 1)}, torch.tensor([0]))
    with pytest.raises(Unsupported, match=r"class_labels\) is a object"):
        take_rows(unet, (sample,), {"class_labels": object()}, torch.tensor([0]))
    for ask in (lambda: rows_of(nn.Linear(1, 1), (sample,), {}), lambda: cross_attention(nn.Linear(1, 1))):
        with pytest.raises(Unsupported, match="Linear"):
            ask()


def test_row_table_names_arguments_that_exist():
    for name, places in ROW_ARGS.items():
        parameters = anatomy._parameters(getattr(diffusers, name)) if hasattr(diffusers, name) else None
        assert parameters is None or places.keys() <= set(parameters), name


# ------------------------------------------------------------------------------------------------- components


@pytest.mark.parametrize("name", NAMES)
def test_components(name):
    pipe, tags = pipeline(name), FAMILIES[name].tags
    expected = ["unet"] if "unet" in tags else ["transformer"] + ["transformer_2"] * (name == "wan22")
    assert list(denoisers(pipe)) == expected
    assert list(decoders(pipe)) == ([] if name == "ddpm" else ["vae"])
    assert set(text_encoders(pipe)) == {part for part in pipe.components if part.startswith("text_encoder")}


def test_no_denoiser_is_refused_by_name():
    with pytest.raises(Unsupported, match="DiffusionPipeline has no denoiser"):
        denoisers(DiffusionPipeline())


@pytest.mark.parametrize("name", NAMES)
def test_cross_attention_reads_the_text_and_nothing_else_does(name):
    module, args, kwargs = _calls(name)[0]
    listed, text_readers = {id(part) for part in cross_attention(module)}, set()

    def note(part, args, kwargs):
        states = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if isinstance(states, torch.Tensor) and states is not hidden:
            text_readers.add(id(part))

    kinds = ("Attention", "WanAttention")
    parts = [part for part in module.modules() if type(part).__name__ in kinds]
    handles = [part.register_forward_pre_hook(note, with_kwargs=True) for part in parts]
    with torch.no_grad():
        module(*args, **kwargs)
    for handle in handles:
        handle.remove()
    joint = not CROSS_ATTENTION[type(module).__name__]
    assert listed == (set() if joint else text_readers)
    assert joint or listed
