"""The drop-in: what a user of the plain pipeline does goes on working, and the plain pipeline stays as it was."""

import copy
import inspect
import pickle
import threading
import warnings

import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    HeunDiscreteScheduler,
    LCMScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPipeline,
)
from peft import LoraConfig, inject_adapter_in_model

from fewstep import AcceleratedPipeline, Recipe, Unsupported
from fewstep.accel.run import current_run
from fewstep.accel.technique import Fidelity, Stage, Technique
from fewstep.accel.zoo.tiny import FAMILIES, tiny


class Broken(Technique):
    """Changes a pipeline, then fails."""

    name, stage, fidelity = "broken", Stage.CACHE, Fidelity.EXACT

    def apply(self, target, patches):
        patches.set_data(next(target.denoiser.parameters()), torch.zeros(1), "broken")
        patches.wrap_forward(target.denoiser, lambda inner, *a, **k: inner(*a, **k))
        raise RuntimeError("half way")


class Spy(Technique):
    """Writes down what it sees at the denoiser and at the scheduler's step."""

    name, stage, fidelity = "spy", Stage.CACHE, Fidelity.EXACT

    def apply(self, target, patches):
        seen = self.seen
        for module in target.denoisers.values():
            patches.wrap_forward(module, lambda inner, *a, **k: (seen.append(current_run().rows), inner(*a, **k))[1])

    @property
    def seen(self):
        return SEEN.setdefault(id(self), [])


SEEN = {}


@pytest.mark.parametrize("family", FAMILIES)
def test_empty_recipe_is_bit_equal_and_leaves_no_trace(family, outputs):
    pipe = tiny(family)
    plain = outputs(pipe, family)
    before = {name: dict(vars(module)) for name, module in modules(pipe)}
    fast = AcceleratedPipeline(pipe, Recipe())
    assert torch.equal(outputs(fast, family), plain)
    assert fast.detach() is pipe
    assert {name: dict(vars(module)) for name, module in modules(pipe)} == before
    assert torch.equal(outputs(pipe, family), plain)


def modules(pipe):
    for part, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            for name, module in component.named_modules():
                yield f"{part}.{name}", module


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        (DDIMScheduler, {"eta": 1.0}),
        (EulerAncestralDiscreteScheduler, {}),
        (LCMScheduler, {}),
        (HeunDiscreteScheduler, {}),
        (DPMSolverMultistepScheduler, {}),
    ],
)
def test_schedulers_keep_their_options(scheduler, options, outputs):
    """Pipelines drop eta and generator for a scheduler whose `step` does not show them in its signature."""
    pipe = tiny("sd")
    pipe.scheduler = scheduler.from_config(pipe.scheduler.config)
    plain = outputs(pipe, "sd", **options)
    fast = AcceleratedPipeline(pipe, Recipe())
    assert torch.equal(outputs(fast, "sd", **options), plain)
    assert torch.equal(outputs(fast, "sd", **options), plain)


def test_it_is_an_instance_of_the_pipeline_class():
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe())
    assert isinstance(fast, StableDiffusionPipeline) and isinstance(fast, AcceleratedPipeline)
    assert type(fast).__name__ == "StableDiffusionPipeline"
    assert inspect.signature(fast.__call__) == inspect.signature(pipe.__call__)
    assert fast.components.keys() == pipe.components.keys()


def test_attributes_fall_through_both_ways():
    pipe, other = tiny("sd"), tiny("sd", seed=3)
    fast = AcceleratedPipeline(pipe, Recipe())
    assert fast.unet is pipe.unet
    fast.vae = other.vae
    assert pipe.vae is other.vae
    pipe.text_encoder = other.text_encoder
    assert fast.text_encoder is other.text_encoder
    fast.enable_attention_slicing()
    fast.set_progress_bar_config(disable=True)


def test_from_pipe_gives_the_sibling_task(outputs):
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe())
    sibling = AutoPipelineForImage2Image.from_pipe(fast)
    assert type(sibling) is StableDiffusionImg2ImgPipeline and sibling.unet is pipe.unet
    sibling.set_progress_bar_config(disable=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sibling shares the accelerated denoiser and is told so
        alone = outputs(sibling, "sd_img2img")
    fast.detach()
    assert torch.equal(outputs(sibling, "sd_img2img"), alone)


def test_the_denoiser_replaced_by_the_user_is_accelerated(outputs):
    pipe, other = tiny("sd"), tiny("sd", seed=3)
    spy = Spy()
    fast = AcceleratedPipeline(pipe, Recipe(spy))
    old = fast.unet
    fast.unet = other.unet
    outputs(fast, "sd")
    assert len(spy.seen) == 3
    assert "forward" not in vars(old)
    fast.detach()
    assert "forward" not in vars(other.unet)


def test_adapters_and_another_denoiser_after_the_originals_were_freed(outputs):
    from fewstep.accel.kernels.precision import Bfloat16

    fast = AcceleratedPipeline(tiny("sd"), Recipe(Bfloat16()), keep_original=False)
    before = outputs(fast, "sd", output_type="latent")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False), fast.unet)
    fast.unet.peft_config = {"default": LoraConfig()}
    assert not torch.equal(outputs(fast, "sd", output_type="latent"), before)
    with pytest.raises(Unsupported, match="freed"):
        fast.detach()
    fast.unet = tiny("sd", seed=3).unet
    assert torch.isfinite(outputs(fast, "sd", output_type="latent")).all()
    assert fast.unet.conv_in.weight.dtype == torch.bfloat16


def test_failure_half_way_restores(outputs):
    pipe = tiny("sd")
    plain, before = outputs(pipe, "sd"), {n: dict(vars(m)) for n, m in modules(pipe)}
    with pytest.raises(RuntimeError, match="half way"):
        AcceleratedPipeline(pipe, Recipe(Broken()))
    assert {n: dict(vars(m)) for n, m in modules(pipe)} == before
    assert torch.equal(outputs(pipe, "sd"), plain)


def test_a_call_that_raises_leaves_the_next_one_clean(outputs):
    pipe = tiny("sd")
    plain, smaller = outputs(pipe, "sd"), outputs(pipe, "sd", num_inference_steps=2, height=32, width=32)
    fast = AcceleratedPipeline(pipe, Recipe())

    def stop(pipe, step, timestep, kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        outputs(fast, "sd", callback_on_step_end=stop)
    assert current_run() is None
    assert torch.equal(outputs(fast, "sd", num_inference_steps=2, height=32, width=32), smaller)
    assert torch.equal(outputs(fast, "sd"), plain)


def test_callbacks_interrupt_and_read_the_call(outputs):
    fast = AcceleratedPipeline(tiny("sd"), Recipe())
    steps = []

    def watch(pipe, step, timestep, kwargs):
        steps.append(pipe.scheduler.timesteps.tolist())
        pipe._interrupt = step == 1
        return kwargs

    result = fast.run(**FAMILIES["sd"].call() | {"num_inference_steps": 5, "callback_on_step_end": watch})
    assert result.report.denoiser_calls == 2
    assert fast.num_timesteps == 5 and fast.scheduler.timesteps.tolist() == steps[0]


def test_interrupt_from_outside_reaches_the_call(outputs):
    fast = AcceleratedPipeline(tiny("sd"), Recipe())

    def stop(pipe, step, timestep, kwargs):
        fast._interrupt = True
        return kwargs

    call = FAMILIES["sd"].call() | {"num_inference_steps": 5}
    assert fast.run(**call, callback_on_step_end=stop).report.denoiser_calls == 1
    assert fast.run(**call).report.denoiser_calls == 5


def test_latents_lists_and_embeddings(outputs):
    pipe = tiny("sd")
    prompts = {
        "prompt": ["a", "a red fox"],
        "negative_prompt": ["", "b"],
        "generator": [torch.Generator().manual_seed(i) for i in range(2)],
    }
    latent = outputs(pipe, "sd", **prompts, output_type="latent")
    several = outputs(pipe, "sd", num_images_per_prompt=2)
    embeds = torch.randn(1, *pipe.encode_prompt("x", "cpu", 1, False)[0].shape[1:])
    given = {"prompt": None, "prompt_embeds": embeds, "negative_prompt_embeds": -embeds, "negative_prompt": None}
    embedded = outputs(pipe, "sd", **given)
    fast = AcceleratedPipeline(pipe, Recipe())
    prompts["generator"] = [torch.Generator().manual_seed(i) for i in range(2)]
    assert torch.equal(outputs(fast, "sd", **prompts, output_type="latent"), latent)
    assert torch.equal(outputs(fast, "sd", num_images_per_prompt=2), several)
    assert torch.equal(outputs(fast, "sd", **given), embedded)


def test_the_bare_pipeline_runs_plain_with_one_warning(outputs):
    pipe, spy = tiny("sd"), Spy()
    plain = outputs(pipe, "sd")
    AcceleratedPipeline(pipe, Recipe(spy))
    with pytest.warns(UserWarning, match="runs plain") as caught:
        assert torch.equal(outputs(pipe, "sd"), plain)
    assert len(caught) == 1 and not spy.seen


def test_two_wrappers_share_a_denoiser(outputs):
    first, second = tiny("sd"), tiny("sd_img2img")
    second.unet = first.unet
    plain = outputs(first, "sd"), outputs(second, "sd_img2img")
    spies = Spy(), Spy()
    one, two = AcceleratedPipeline(first, Recipe(spies[0])), AcceleratedPipeline(second, Recipe(spies[1]))
    assert torch.equal(outputs(one, "sd"), plain[0]) and len(spies[0].seen) == 3 and not spies[1].seen
    one.detach()
    assert torch.equal(outputs(two, "sd_img2img"), plain[1]) and len(spies[1].seen) == 3
    two.detach()
    assert "forward" not in vars(first.unet)


def test_rows_name_branch_image_step_and_noise():
    pipe, spy = tiny("sd"), Spy()
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config)
    fast = AcceleratedPipeline(pipe, Recipe(spy))
    fast(**FAMILIES["sd"].call() | {"prompt": ["a", "b"], "negative_prompt": None, "guidance_scale": 5.0})
    assert [row.branch for row in spy.seen[0]] == ["uncond", "uncond", "cond", "cond"]
    assert [row.image for row in spy.seen[0]] == [0, 1, 0, 1]
    assert [rows[0].step for rows in spy.seen] == [0, 1, 2]
    alphas = fast.scheduler.alphas_cumprod[fast.scheduler.timesteps]
    levels = torch.tensor([rows[0].sigma for rows in spy.seen])
    torch.testing.assert_close(levels, ((1 - alphas) / alphas).sqrt())


def test_rows_follow_guidance_that_is_switched_off():
    fast = AcceleratedPipeline(tiny("sd"), Recipe(spy := Spy()))

    def switch(pipe, step, timestep, kwargs):
        if step == 0:
            pipe._guidance_scale = 0.0
            kwargs["prompt_embeds"] = kwargs["prompt_embeds"].chunk(2)[1]
        return kwargs

    inputs = ["latents", "prompt_embeds"]
    fast(**FAMILIES["sd"].call(), callback_on_step_end=switch, callback_on_step_end_tensor_inputs=inputs)
    assert [[row.branch for row in rows] for rows in spy.seen] == [["uncond", "cond"], ["cond"], ["cond"]]


def test_steps_are_counted_for_second_order_samplers():
    pipe, spy = tiny("sd"), Spy()
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    AcceleratedPipeline(pipe, Recipe(spy))(**FAMILIES["sd"].call())
    assert [rows[0].step for rows in spy.seen] == [0, 1, 2, 3, 4]


def test_a_deep_copied_scheduler_does_not_advance_the_run():
    pipe, spy = tiny("sd"), Spy()
    fast = AcceleratedPipeline(pipe, Recipe(spy))

    def side_step(pipe, step, timestep, kwargs):
        twin = copy.deepcopy(pipe.scheduler)
        twin.set_timesteps(9)
        twin.step(kwargs["latents"], twin.timesteps[0], kwargs["latents"])
        return kwargs

    fast(**FAMILIES["sd"].call(), callback_on_step_end=side_step)
    assert [rows[0].step for rows in spy.seen] == [0, 1, 2]


@pytest.mark.parametrize("family", ["flux", "wan", "qwen_image"])
def test_branches_of_separate_calls(family):
    spy = Spy()
    AcceleratedPipeline(tiny(family), Recipe(spy))(**FAMILIES[family].call())
    assert [rows[0].branch for rows in spy.seen] == ["cond", "uncond"] * 3


def test_the_pipelines_own_scheduler_is_not_stepped(outputs):
    pipe = tiny("sd")
    before = {k: v for k, v in vars(pipe.scheduler).items() if k not in ("timesteps", "sigmas", "num_inference_steps")}
    fast = AcceleratedPipeline(pipe, Recipe())
    outputs(fast, "sd")
    after = {k: v for k, v in vars(pipe.scheduler).items() if k not in ("timesteps", "sigmas", "num_inference_steps")}
    assert after.keys() == before.keys() and all(after[k] is before[k] for k in before)


@pytest.mark.parametrize("family", ["sd", "sdxl", "flux", "wan"])
def test_four_threads_give_what_each_call_gives_alone(family, outputs):
    """From prompt to pixels, different prompts, step counts and seeds."""
    pipe = tiny(family)
    fast = AcceleratedPipeline(pipe, Recipe())
    jobs = [{"prompt": "abcd"[i % 4] * (i + 1), "num_inference_steps": 1 + i % 3, "seed": i} for i in range(20)]
    alone = [outputs(fast, family, **job) for job in jobs]
    together = [None] * 20

    def work(thread):
        for i in range(thread, 20, 4):
            together[i] = outputs(fast, family, **jobs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_a_lora_scale_across_threads_is_refused(outputs):
    fast = AcceleratedPipeline(tiny("sd"), Recipe())
    refused = []

    def meddle(pipe, step, timestep, kwargs):
        def other():
            try:
                outputs(fast, "sd", cross_attention_kwargs={"scale": 0.5})
            except Unsupported as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return kwargs

    outputs(fast, "sd", callback_on_step_end=meddle)
    assert len(refused) == 3 and "LoRA scale" in refused[0]


def test_calls_of_a_pipeline_that_swaps_processors_are_exclusive():
    fast = AcceleratedPipeline(tiny("sd_pag"), Recipe())
    with (
        fast.attachment.open_call({}),
        pytest.raises(Unsupported, match="PAG"),
        fast.attachment.open_call({}),
    ):
        pass


@pytest.mark.parametrize("when", ["before", "after"])
def test_model_offload_before_and_after(when, outputs, monkeypatch):
    """accelerate's hooks, put back by diffusers at the end of every call."""
    pipe = tiny("sd")
    plain, spy = outputs(pipe, "sd"), Spy()
    if when == "before":
        pipe.enable_model_cpu_offload(device="cpu")
    fast = AcceleratedPipeline(pipe, Recipe(spy))
    if when == "after":
        fast.enable_model_cpu_offload(device="cpu")
    for call in range(1, 4):
        assert torch.equal(outputs(fast, "sd"), plain)
        assert len(spy.seen) == 3 * call
    fast.detach()
    assert torch.equal(outputs(pipe, "sd"), plain)
    pipe.remove_all_hooks()
    assert torch.equal(outputs(pipe, "sd"), plain)


def test_save_and_load_give_the_same_images(tmp_path, outputs):
    fast = AcceleratedPipeline(tiny("sd"), Recipe(num_inference_steps=2))
    expected = outputs(fast, "sd")
    fast.save_pretrained(tmp_path)
    again = AcceleratedPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.recipe == fast.recipe
    assert torch.equal(outputs(again, "sd"), expected)
    stock = StableDiffusionPipeline.from_pretrained(tmp_path)
    assert type(stock.scheduler) is type(fast.scheduler)


def test_call_defaults_give_way_to_the_caller():
    fast = AcceleratedPipeline(tiny("sd"), Recipe(num_inference_steps=2))
    call = FAMILIES["sd"].call()
    call.pop("num_inference_steps")
    assert fast.run(**call).report.denoiser_calls == 2
    assert fast.run(**call, num_inference_steps=4).report.denoiser_calls == 4


def test_report_and_explain():
    fast = AcceleratedPipeline(tiny("sd"), Recipe(Spy(), guidance_scale=2.0))
    report = fast.run(**FAMILIES["sd"].call()).report
    assert (report.denoiser_calls, report.nfe, report.recompiles) == (3, 6, 0)
    assert 0 < report.text_s + report.denoise_s + report.decode_s <= report.total_s
    assert report.peak_bytes > 0 and "denoiser calls" in str(report)
    assert "Spy()" in fast.explain() and "guidance_scale=2.0" in fast.explain()


def test_what_cannot_work_is_refused_in_words():
    pipe = tiny("sd")
    fast = AcceleratedPipeline(pipe, Recipe())
    for attempt, words in [
        (lambda: pickle.dumps(fast), "save_pretrained"),
        (lambda: copy.deepcopy(fast), "detach"),
        (lambda: AcceleratedPipeline(fast, Recipe()), "accelerated already"),
        (lambda: AcceleratedPipeline(pipe.unet, Recipe()), "accelerate"),
    ]:
        with pytest.raises(Unsupported, match=words):
            attempt()
    fast.detach()
    with pytest.raises(Unsupported, match="detached"):
        fast("x")


def test_a_compiled_denoiser_is_refused():
    pipe = tiny("sd")
    pipe.unet.compile()
    with pytest.raises(Unsupported, match="CompileBlocks"):
        AcceleratedPipeline(pipe, Recipe())
