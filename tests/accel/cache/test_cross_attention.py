"""CrossAttentionCache: keys and values of the text once a call, and the picture bit for bit as without."""

import gc
import threading
import weakref

import accelerate
import pytest
import torch
from diffusers import DDIMScheduler
from peft import LoraConfig

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel import denoiser as alone
from fewstep.accel.cache import cross_attention
from fewstep.accel.cache.cross_attention import CrossAttentionCache, before, projections
from fewstep.accel.errors import Unsupported
from fewstep.accel.zoo.tiny import FAMILIES, tiny

# The plain pipeline is called beside the accelerated one, which warns once.
pytestmark = [
    pytest.mark.filterwarnings("ignore:this pipeline was called directly"),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
]

JOINT = ("ddpm", "dit", "sd3", "flux", "flux_img2img", "cogvideox", "qwen_image", "z_image")
READING = [name for name in FAMILIES if name not in JOINT]
BRANCHES = {"wan": 2, "wan22": 2}  # texts that come one denoiser call each
UNETS = ("sd", "sdxl")


def modules(pipe):
    found = [getattr(pipe, name, None) for name in ("unet", "transformer", "transformer_2")]
    return [m for denoiser in found if denoiser is not None for m in (*before(denoiser), *projections(denoiser))]


def counting(pipe):
    """Computations of each projection, counted beneath whatever is attached later."""
    seen = []
    for module in modules(pipe):
        module.forward = lambda *args, plain=module.forward, module=module: (seen.append(module), plain(*args))[1]
    return seen


def cached(pipe):
    return AcceleratedPipeline(pipe, Recipe(CrossAttentionCache()))


def call(name, **changed):
    return FAMILIES[name].call() | {"output_type": "latent"} | changed


def image(pipe, name, **changed):
    return torch.as_tensor(pipe(**call(name, **changed))[0])


def expect(accelerated, name, **changed):
    """The plain pipeline's picture; gives the counts."""
    result = accelerated.run(**call(name, **changed))
    assert torch.equal(torch.as_tensor(result.output[0]), image(accelerated.attachment.pipe, name, **changed))
    return dict(result.report.counts["cross_attention_cache"])


@pytest.mark.parametrize("name", READING)
def test_once_a_call_and_bit_equal(name):
    pipe = tiny(name)
    plain = image(pipe, name)
    seen, count = counting(pipe), len(modules(pipe)) * BRANCHES.get(name, 1)
    accelerated = cached(pipe)
    for _ in range(3):
        seen.clear()
        result = accelerated.run(**call(name))
        assert torch.equal(torch.as_tensor(result.output[0]), plain)
        assert len(seen) == count == result.report.counts["cross_attention_cache"]["computed"]
        assert not result.report.notes
    image(accelerated.detach(), name)
    assert len(seen) > 2 * count  # again at each step


@pytest.mark.parametrize("name", JOINT)
def test_refused_where_the_text_is_not_read_alone(name):
    with pytest.raises(Unsupported, match="leave it out"):
        cached(tiny(name))


@pytest.mark.parametrize("name", ["sd", "pixart", "sana", "wan"])
def test_call_by_call(name):
    """Other prompts, batches, steps, guidance; and an interrupted call before another."""
    accelerated = cached(tiny(name))
    images = {"num_videos_per_prompt" if name == "wan" else "num_images_per_prompt": 2}
    pair = {"prompt": ["a hen", "a fox"], "negative_prompt": ["x", "y"]}
    for changed in ({}, {"prompt": "a hen"}, pair, {**pair, **images}, {"num_inference_steps": 5}, FAMILIES[name].off):
        assert expect(accelerated, name, **changed)["reused"]
    callback = "callback" if name == "pixart" else "callback_on_step_end"
    with pytest.raises(ZeroDivisionError):
        accelerated(**FAMILIES[name].call(), **{callback: lambda *_: 1 / 0})
    expect(accelerated, name)


def test_self_attention_is_left_alone():
    unet = tiny("sdxl").unet
    wrapped = set(projections(unet))
    assert not wrapped & {part for path, part in unet.named_modules() if ".attn1." in path}
    assert len(wrapped) == 2 * sum(path.endswith(".attn2") for path, _ in unet.named_modules())


# ------------------------------------------------------------------------------------------ what happens mid-call


def at_step(step, action):
    """A callback that acts after `step`, on a call of its own: the pipeline runs it once."""

    def callback(pipe, index, timestep, tensors):
        return action(pipe, tensors) or {} if index == step else {}

    return {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}


@pytest.mark.parametrize("name", UNETS)
def test_text_exchanged_or_changed_in_place_by_a_callback(name):
    accelerated = cached(tiny(name))
    steps = {"num_inference_steps": 4}
    actions = (
        lambda pipe, tensors: {"prompt_embeds": tensors["prompt_embeds"] * 0.5},
        lambda pipe, tensors: {"prompt_embeds": tensors["prompt_embeds"].flip(0)},
        lambda pipe, tensors: tensors["prompt_embeds"].mul_(0.5) is None,
    )
    plain = image(accelerated.attachment.pipe, name, **steps)
    for action in actions:
        changed = {**steps, **at_step(1, action)}
        counts = expect(accelerated, name, **changed)
        assert counts["computed"] == counts["reused"]
        assert not torch.equal(image(accelerated.attachment.pipe, name, **changed), plain)


def test_guidance_switched_off_mid_call():
    def off(pipe, tensors):
        pipe._guidance_scale = 0.0
        return {"prompt_embeds": tensors["prompt_embeds"].chunk(2)[-1]}

    assert expect(cached(tiny("sd")), "sd", **at_step(0, off), num_inference_steps=4)["reused"]


def lora(denoiser, name, seed):
    denoiser.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["attn2.to_k", "attn2.to_v"]), name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for path, parameter in denoiser.named_parameters():
            if f".{name}." in path:
                parameter.normal_(std=0.3)


@pytest.mark.parametrize("name", ["sd", "sana"])
def test_lora_on_keys_and_values(name):
    pipe = tiny(name)
    denoiser = pipe.unet if name == "sd" else pipe.transformer
    accelerated = cached(pipe)
    plain = image(pipe, name)
    lora(denoiser, "one", 1)
    lora(denoiser, "two", 2)
    pictures = [plain]
    for adapters in (["one"], 1.0), (["two"], 0.5), (["one", "two"], [0.3, 0.7]):
        denoiser.set_adapters(*adapters)
        assert expect(accelerated, name)["reused"]
        pictures.append(image(pipe, name))
    assert not any(torch.equal(a, b) for i, a in enumerate(pictures) for b in pictures[:i])
    denoiser.disable_adapters()
    expect(accelerated, name)
    denoiser.enable_adapters()
    if name == "sd":
        expect(accelerated, name, cross_attention_kwargs={"scale": 0.4})
    denoiser.fuse_lora()
    expect(accelerated, name)
    denoiser.unfuse_lora()
    denoiser.delete_adapters(["one", "two"])
    expect(accelerated, name)


SWITCHES = {
    "another": lambda pipe, _: pipe.unet.set_adapters("two"),
    "rescaled": lambda pipe, _: pipe.unet.set_adapters("one", 0.25),
    "off": lambda pipe, _: pipe.unet.disable_adapters(),
    "fused": lambda pipe, _: pipe.unet.fuse_lora(0.5),
}


@pytest.mark.parametrize("switch", SWITCHES)
def test_lora_switched_by_a_callback(switch):
    def picture(wrap, **changed):
        pipe = tiny("sd")
        lora(pipe.unet, "one", 1)
        lora(pipe.unet, "two", 2)
        pipe.unet.set_adapters("one")
        return image(wrap(pipe), "sd", num_inference_steps=4, **changed)

    plain = picture(lambda pipe: pipe, **at_step(1, SWITCHES[switch]))
    assert torch.equal(picture(cached, **at_step(1, SWITCHES[switch])), plain)
    assert not torch.equal(picture(cached), plain)


def test_weights_changed_in_place_between_and_within_calls():
    pipe = tiny("pixart")
    accelerated = cached(pipe)
    expect(accelerated, "pixart")
    model = pipe.transformer
    weights = model.caption_projection.linear_1.weight, model.transformer_blocks[1].attn2.to_v.weight
    for weight in weights:
        with torch.no_grad():
            weight.mul_(1.5)
        expect(accelerated, "pixart")
    pictures = []
    for caller in accelerated, pipe:
        kept = weights[1].detach().clone()
        change = lambda step, *_: weights[1].detach().mul_(1.5) if step == 1 else None  # noqa: E731
        pictures.append(image(caller, "pixart", callback=change))
        weights[1].detach().copy_(kept)
    assert torch.equal(*pictures)
    assert not torch.equal(pictures[0], image(pipe, "pixart"))


# ------------------------------------------------------------------------------------------- how the model is set up


@pytest.mark.parametrize("name", UNETS)
def test_fused_projections(name):
    pipe = tiny(name)
    pipe.fuse_qkv_projections()
    accelerated = cached(pipe)
    counts = expect(accelerated, name)
    assert counts["reused"] == 2 * counts["computed"] > 0
    pipe.unfuse_qkv_projections()
    expect(accelerated, name)


def test_ip_adapter():
    pipe = tiny("sd")
    width = pipe.unet.config.cross_attention_dim
    state = {}
    for index, path in enumerate(pipe.unet.attn_processors):
        if path.endswith("attn2.processor"):
            size = pipe.unet.get_submodule(path.removesuffix(".processor")).to_k.out_features
            state |= {f"{index}.to_{kind}_ip.weight": torch.randn(size, width) for kind in "kv"}
    projection = {"proj.weight": torch.randn(4 * width, 8), "proj.bias": torch.zeros(4 * width)}
    projection |= {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    pipe.unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": state}])
    accelerated = cached(pipe)
    pictures = []
    for seed in 1, 2:
        embeds = [torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(seed))]
        assert expect(accelerated, "sd", ip_adapter_image_embeds=embeds)["reused"]
        pictures.append(image(accelerated, "sd", ip_adapter_image_embeds=embeds))
    assert not torch.equal(*pictures)


def test_offload():
    """Layer by layer, weights come to another place at each step; model by model, they stay for the call."""
    pipe = tiny("sd")
    accelerated = cached(pipe)
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    for part in parts:
        accelerate.cpu_offload(part, execution_device=torch.device("cpu"))
    for _ in range(3):
        expect(accelerated, "sd")
    for part in parts:
        accelerate.hooks.remove_hook_from_submodules(part)
    _, hook = accelerate.cpu_offload_with_hook(pipe.unet, torch.device("cpu"))
    for _ in range(3):
        assert expect(accelerated, "sd")["reused"]
        hook.offload()


def test_inference_mode_is_exact_and_says_that_nothing_was_reused():
    pipe = tiny("sd")
    accelerated = cached(pipe)
    plain = image(pipe, "sd")
    with torch.inference_mode():
        result = accelerated.run(**call("sd"))
    assert torch.equal(result.output[0], plain)
    assert "inference mode" in result.report.notes[0] and not result.report.counts["cross_attention_cache"]["reused"]


def test_threads():
    pipe = tiny("sd")
    plain = {prompt: image(pipe, "sd", prompt=prompt) for prompt in "abcd"}
    accelerated, same = cached(pipe), []

    def work(prompt):
        same.extend(torch.equal(image(accelerated, "sd", prompt=prompt), plain[prompt]) for _ in range(2))

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in plain]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 8


# ----------------------------------------------------------------------------------------------------- the own loop


def texts(count, grad=False):
    seeds = [torch.Generator().manual_seed(i) for i in range(count)]
    return [torch.randn(1, 7, 32, generator=seed).requires_grad_(grad) for seed in seeds]


def test_own_loop_is_bounded_and_exact():
    unet = tiny("sd").unet
    sample, prompts = torch.ones(1, 4, 16, 16), texts(6)
    plain = [unet(sample, 1, text).sample for text in prompts]
    alone.accelerate(unet, Recipe(CrossAttentionCache()))
    with torch.no_grad(), alone.run(DDIMScheduler()) as run:
        for _ in range(2):
            for text, expected in zip(prompts, plain, strict=True):
                assert torch.equal(unet(sample, 1, text).sample, expected)
        held = [slot for key, slot in run._slots.items() if isinstance(key, tuple)]
        assert len(held) == len(projections(unet)) and all(len(entries) == cross_attention.KEPT for entries in held)
    alone.release(unet)


def test_own_loop_under_autograd_computes_anew():
    unet = alone.accelerate(tiny("sd").unet, Recipe(CrossAttentionCache()))
    (text,) = texts(1, grad=True)
    with alone.run():
        for _ in range(2):
            unet(torch.ones(1, 4, 16, 16), 1, text).sample.sum().backward()
    assert text.grad is not None


def test_an_address_that_is_given_to_another_text_is_no_hit():
    unet = tiny("sd").unet
    plain = [unet(torch.ones(1, 4, 16, 16), 1, text).sample for text in texts(8)]
    alone.accelerate(unet, Recipe(CrossAttentionCache()))
    with torch.no_grad(), alone.run():
        for index, expected in enumerate(plain):
            assert torch.equal(unet(torch.ones(1, 4, 16, 16), 1, texts(8)[index]).sample, expected)


def test_memory_is_freed_when_the_call_ends(monkeypatch):
    held = []
    entry = cross_attention.Entry
    monkeypatch.setattr(cross_attention, "Entry", lambda *a: (held.append(weakref.ref(a[2])), entry(*a))[1])
    accelerated = cached(tiny("wan"))
    accelerated(**FAMILIES["wan"].call())
    gc.collect()
    gc.disable()
    try:
        held.clear()
        accelerated(**FAMILIES["wan"].call())
        assert held and not any(reference() is not None for reference in held)
    finally:
        gc.enable()
