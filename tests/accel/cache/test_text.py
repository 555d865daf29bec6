"""TextCache: the same embeddings as encoding anew, whatever was done to the pipeline in between."""

import threading

import accelerate
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel.cache.fingerprint import fingerprint
from fewstep.accel.cache.text import Store, TextCache, text_modules
from fewstep.accel.denoiser import accelerate as accelerate_alone
from fewstep.accel.errors import InvalidRecipe, Unsupported
from fewstep.accel.zoo.tiny import FAMILIES, tiny

# The plain pipeline is called beside the accelerated one, which warns once.
pytestmark = [
    pytest.mark.filterwarnings("ignore:this pipeline was called directly"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]

ENCODING = [name for name in FAMILIES if name not in ("ddpm", "dit")]
REST = {"num_inference_steps": 1, "output_type": "latent"}


def call(name, **changed):
    """What these tests change is how a prompt is encoded: one step shows it."""
    given = FAMILIES[name].call() | ({} if "image_input" in FAMILIES[name].tags else REST) | changed
    copies = {key: list(value) if isinstance(value, list) else value for key, value in given.items()}
    return {key: value for key, value in copies.items() if value is not ...}  # Z-Image writes into the caller's list


def image(pipe, name, **changed):
    return torch.as_tensor(pipe(**call(name, **changed))[0])


def run(accelerated, name, **changed):
    result = accelerated.run(**call(name, **changed))
    return torch.as_tensor(result.output[0]), dict(result.report.counts["text_cache"])


def cached(pipe, **settings):
    return AcceleratedPipeline(pipe, Recipe(TextCache(**settings)))


def expect(accelerated, name, counts, **changed):
    """The picture that the plain pipeline gives right now, found in the cache or not as `counts` says."""
    ours, found = run(accelerated, name, **changed)
    assert found == counts
    assert torch.equal(ours, image(accelerated.attachment.pipe, name, **changed))


def encodings(pipe):
    """Counts the forward passes of all text encoders."""
    seen = []
    for encoder in text_modules(pipe).values():
        encoder.register_forward_hook(lambda *_: seen.append(1))
    return seen


@pytest.mark.parametrize("name", ENCODING)
def test_second_call_encodes_nothing_and_is_bit_equal(name):
    plain = torch.as_tensor(tiny(name)(**FAMILIES[name].call())[0])
    pipe = tiny(name)  # Sana sets up its tokenizer in its first call
    accelerated, seen = cached(pipe), encodings(pipe)
    counts = []
    for _ in range(3):
        result = accelerated.run(**FAMILIES[name].call())
        assert torch.equal(torch.as_tensor(result.output[0]), plain)
        counts.append((dict(result.report.counts["text_cache"]), len(seen)))
    asked = 2 if {"true_cfg_scale"} & FAMILIES[name].call().keys() else 1  # those encode the negative prompt apart
    assert [c for c, _ in counts] == [{"misses": asked}, {"hits": asked}, {"hits": asked}]
    assert counts[0][1] == counts[2][1] > 0
    expect(accelerated, name, {"misses": 1} if asked == 1 else {"hits": 1, "misses": 1}, prompt="a tan cat")


@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "pixart", "qwen_image", "z_image"])
def test_batches(name):
    """Whole batches: shorter mates pad what is next to them, and a row's copies are not always side by side."""
    accelerated, negative = cached(tiny(name)), ["blurry", "x"]
    more = {} if name == "z_image" else {"num_images_per_prompt": 2}
    for prompts in (["a red fox", "a hen"], ["a hen", "a red fox"], ["a hen", "a very much longer prompt"]):
        for _ in range(2):
            expected = {"hits": 1} if _ else {"misses": 1}
            if name == "qwen_image":  # the same negative prompts all along, asked apart
                expected = {"hits": 2} if _ else {"misses": 1, "hits": 1}
                if prompts == ["a red fox", "a hen"] and not _:
                    expected = {"misses": 2}
            expect(accelerated, name, expected, prompt=prompts, negative_prompt=negative, **more)


def test_every_argument_counts():
    accelerated = cached(tiny("sdxl"))
    changes = (
        {},
        {"prompt": "a hen"},
        {"prompt": ["a red fox"], "negative_prompt": ["blurry"]},
        {"prompt_2": "a hen"},
        {"negative_prompt": ...},
        {"negative_prompt": ""},
        {"negative_prompt_2": "sharp"},
        {"clip_skip": 1},
        {"num_images_per_prompt": 2},
        {"guidance_scale": 1.0},
    )
    for changed in changes:
        expect(accelerated, "sdxl", {"misses": 1}, **changed)
    for changed in changes:
        expect(accelerated, "sdxl", {"hits": 1}, **changed)
    expect(accelerated, "sdxl", {"hits": 1}, guidance_scale=9.0, height=16, num_inference_steps=2)


def test_pipeline_templates_and_lengths_count():
    pipe = tiny("qwen_image")
    accelerated = cached(pipe)
    expect(accelerated, "qwen_image", {"misses": 2})
    pipe.prompt_template_encode = pipe.prompt_template_encode.replace("Describe", "size")
    expect(accelerated, "qwen_image", {"misses": 2})
    expect(accelerated, "qwen_image", {"hits": 2})


def test_padding_side_counts():
    pipe = tiny("qwen_image")
    accelerated = cached(pipe)
    for side in "right", "left":
        pipe.tokenizer.padding_side = side
        expect(accelerated, "qwen_image", {"misses": 2})


def test_what_is_not_kept():
    pipe = tiny("sd")
    with torch.no_grad():
        embeds, negative = pipe.encode_prompt("a red fox", "cpu", 1, True, "blurry")
    accelerated = cached(pipe)
    given = {"prompt": ..., "negative_prompt": ..., "prompt_embeds": embeds, "negative_prompt_embeds": negative}
    for changed in (given, {"cross_attention_kwargs": {"scale": 0.5}}):
        for _ in range(2):
            expect(accelerated, "sd", {"bypassed": 1}, **changed)
    pipe.text_encoder.train()
    assert run(accelerated, "sd")[1] == {"bypassed": 1}
    pipe.text_encoder.eval()
    with accelerated.attachment.open_call({}) as (view, opened):
        assert view.encode_prompt("a red fox", "cpu", 1, True)[0].requires_grad
        assert dict(opened.report.counts["text_cache"]) == {"bypassed": 1}


def test_returned_embeddings_may_be_changed_in_place():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    with accelerated.attachment.open_call({}) as (view, _), torch.no_grad():
        plain = pipe.encode_prompt("a red fox", "cpu", 1, True, "blurry")
        for _ in range(3):
            found = view.encode_prompt("a red fox", "cpu", 1, True, "blurry")
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
            for tensor in found:
                tensor.zero_()


@pytest.mark.parametrize("first", [True, False])
def test_inference_mode_before_or_after(first):
    accelerated = cached(tiny("sd"))
    for index, inside in enumerate((first, not first)):
        with torch.inference_mode(inside):
            expect(accelerated, "sd", {"hits": 1} if index else {"misses": 1})


# ------------------------------------------------------------------------------------------------ what is bounded


def test_store_holds_max_bytes_of_the_most_recently_used():
    store = Store(3 * 40)
    for key in b"a", b"b", b"c":
        store.put(key, (torch.zeros(10), None))
    store.get(b"a")
    store.put(b"d", [torch.zeros(10)])
    assert list(store.entries) == [b"c", b"a", b"d"] and store.bytes == 120
    store.put(b"e", torch.zeros(20))
    assert list(store.entries) == [b"d", b"e"] and store.bytes == 120
    store.put(b"f", torch.zeros(31))  # larger than all there is: the others stay
    assert list(store.entries) == [b"d", b"e"] and store.bytes == 120


def test_max_bytes_in_a_pipeline():
    pair = 2 * 32 * 32 * 4  # prompt and negative prompt, 32 tokens of width 32, float32
    accelerated = cached(tiny("sd"), max_bytes=2 * pair)
    for prompt, found in zip("abacab", ("misses", "misses", "hits", "misses", "hits", "misses"), strict=True):
        expect(accelerated, "sd", {found: 1}, prompt=prompt)
    accelerated = cached(tiny("sd"), max_bytes=pair - 1)
    for _ in range(2):
        expect(accelerated, "sd", {"misses": 1})


# --------------------------------------------------------------------------------------- encoders that are changed


def lora(encoder, name, seed, dropout=0.0):
    targets = ["q_proj", "v_proj"]
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=4, lora_dropout=dropout, target_modules=targets), encoder, name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for path, parameter in encoder.named_parameters():
            if f".{name}." in path:
                parameter.normal_(std=0.3)


def layers(encoder):
    return [module for module in encoder.modules() if hasattr(module, "merged_adapters")]


def test_lora_of_the_encoder():
    """Loaded, rescaled, switched, off, merged, unmerged: each state is one of its own, and comes back."""
    pipe = tiny("sd")
    accelerated, encoder = cached(pipe), pipe.text_encoder

    def each(method, *args):
        return lambda: [getattr(layer, method)(*args) for layer in layers(encoder)]

    expect(accelerated, "sd", {"misses": 1})
    lora(encoder, "one", 1)
    lora(encoder, "two", 2)
    changes = each("set_adapter", "one"), each("set_scale", "one", 0.5), each("set_adapter", "two")
    for change in (*changes, each("enable_adapters", False)):
        change()
        expect(accelerated, "sd", {"misses": 1})
    each("enable_adapters", True)()
    expect(accelerated, "sd", {"hits": 1})  # "two" again
    each("merge")()
    expect(accelerated, "sd", {"misses": 1})
    each("unmerge")()
    ours, _ = run(accelerated, "sd")
    assert torch.equal(ours, image(pipe, "sd"))


def test_loras_of_equal_shape_are_told_apart_by_their_weights():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    for seed in 1, 2:
        lora(pipe.text_encoder, "style", seed)
        expect(accelerated, "sd", {"misses": 1})
        for layer in layers(pipe.text_encoder):
            layer.delete_adapter("style")


def test_a_lora_with_dropout_in_training_mode_is_not_kept():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    lora(pipe.text_encoder, "one", 1, dropout=0.5)
    pipe.text_encoder.eval()
    expect(accelerated, "sd", {"misses": 1})
    for layer in layers(pipe.text_encoder):
        layer.train()
    assert run(accelerated, "sd")[1] == {"bypassed": 1}


def test_textual_inversion_in_between_and_another_under_the_same_token():
    pipe = tiny("sd")
    accelerated, prompt = cached(pipe), "a <fox>"
    expect(accelerated, "sd", {"misses": 1}, prompt=prompt)
    for seed in 1, 2:
        vector = torch.randn(32, generator=torch.Generator().manual_seed(seed))
        pipe.load_textual_inversion({"<fox>": vector}, token="<fox>")
        expect(accelerated, "sd", {"misses": 1}, prompt=prompt)
        expect(accelerated, "sd", {"hits": 1}, prompt=prompt)
        pipe.unload_textual_inversion()
    expect(accelerated, "sd", {"misses": 1}, prompt="a <fox> again")


def test_another_encoder_and_the_first_again():
    pipe = tiny("sd")
    accelerated, first = cached(pipe), pipe.text_encoder
    expect(accelerated, "sd", {"misses": 1})
    pipe.text_encoder = tiny("sd", seed=5).text_encoder
    expect(accelerated, "sd", {"misses": 1})
    pipe.text_encoder = first
    expect(accelerated, "sd", {"hits": 1})


def test_encoder_changed_in_place():
    pipe = tiny("sd3")
    accelerated = cached(pipe)
    expect(accelerated, "sd3", {"misses": 1})
    weight = pipe.text_encoder_3.encoder.block[0].layer[0].SelfAttention.q.weight
    embedding = pipe.text_encoder.get_input_embeddings().weight
    with torch.no_grad():
        for change in (
            lambda: weight[3, 5].mul_(2.0),  # counted by torch
            lambda: weight.data.add_(0.01),  # as fusing a LoRA does it: not counted
            lambda: embedding.data[40].mul_(2.0),  # as a textual inversion is loaded: not counted, one row
            lambda: pipe.text_encoder_2.to(torch.bfloat16).float(),
            lambda: pipe.text_encoder.text_model.encoder.layers.__delitem__(1),
        ):
            change()
            expect(accelerated, "sd3", {"misses": 1})
            expect(accelerated, "sd3", {"hits": 1})


def test_weights_made_in_inference_mode_have_no_version():
    pipe = tiny("sd")
    with torch.inference_mode():
        pipe.text_encoder = tiny("sd", seed=3).text_encoder
    accelerated = cached(pipe)
    for found in "misses", "hits":
        expect(accelerated, "sd", {found: 1})


@pytest.mark.parametrize("bits", [torch.bfloat16, torch.float8_e4m3fn])
def test_fingerprint_of_any_type_and_layout(bits):
    weights = torch.nn.ParameterDict({"w": torch.randn(12, 7), "s": torch.ones(()), "e": torch.ones(0)}).to(bits)
    weights["t"] = torch.nn.Parameter(torch.randn(5, 6).t())
    before = fingerprint(weights)
    assert fingerprint(weights) == before
    weights["t"].data[0, 0] += 1
    assert fingerprint(weights) != before


# ----------------------------------------------------------------------------------------------- offload, threads


def test_sequential_offload_finds_what_was_kept_before_it_and_sees_changes_made_in_between():
    pipe = tiny("sd")
    accelerated, encoder = cached(pipe), pipe.text_encoder
    expect(accelerated, "sd", {"misses": 1})
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]

    def offload():
        for part in parts:
            accelerate.cpu_offload(part, execution_device=torch.device("cpu"))

    offload()
    assert next(encoder.parameters()).is_meta
    for _ in range(2):
        expect(accelerated, "sd", {"hits": 1})
    for part in parts:
        accelerate.hooks.remove_hook_from_submodules(part)
    encoder.get_input_embeddings().weight.data[40].mul_(2.0)
    expect(accelerated, "sd", {"misses": 1}, prompt="a hen")
    offload()
    expect(accelerated, "sd", {"hits": 1}, prompt="a hen")
    expect(accelerated, "sd", {"misses": 1})
    expect(accelerated, "sd", {"hits": 1})


def test_model_offload_leaves_the_key_alone():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    expect(accelerated, "sd", {"misses": 1})
    _, hook = accelerate.cpu_offload_with_hook(pipe.text_encoder, torch.device("cpu"))
    expect(accelerated, "sd", {"hits": 1})
    expect(accelerated, "sd", {"misses": 1}, prompt="a hen")
    hook.offload()
    expect(accelerated, "sd", {"hits": 1}, prompt="a hen")


def test_four_threads():
    pipe = tiny("sd")
    plain = {prompt: image(pipe, "sd", prompt=prompt) for prompt in "abcd"}
    accelerated, wrong, counts = cached(pipe), [], []

    def work(first):
        for prompt in "abcd"[first:] + "abcd"[:first]:
            ours, found = run(accelerated, "sd", prompt=prompt)
            counts.append(found)
            if not torch.equal(ours, plain[prompt]):
                wrong.append(prompt)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sorted(map(str, counts)) == sorted(["{'misses': 1}"] * 4 + ["{'hits': 1}"] * 12)


def test_an_encoding_that_failed_is_not_kept():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    handle = pipe.text_encoder.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(accelerated, "sd")
    handle.remove()
    expect(accelerated, "sd", {"misses": 1})


def test_detached_the_pipeline_encodes_again():
    pipe = tiny("sd")
    accelerated, seen = cached(pipe), encodings(pipe)
    run(accelerated, "sd")
    plain = accelerated.detach()
    before = len(seen)
    image(plain, "sd")
    assert plain is pipe and len(seen) == 2 * before


def test_refusals_say_why():
    with pytest.raises(Unsupported, match="encode_prompt"):
        cached(tiny("ddpm"))
    with pytest.raises(Unsupported, match="AcceleratedPipeline"):
        accelerate_alone(tiny("sd").unet, Recipe(TextCache()))
    with pytest.raises(InvalidRecipe, match="max_bytes"):
        TextCache(max_bytes=0)
    assert Recipe.from_dict(Recipe(TextCache(max_bytes=9)).to_dict()) == Recipe(TextCache(max_bytes=9))
