"""The transformer family: it is trained on what the stock pipeline will ask of it."""

import pytest
import torch
from diffusers import CogView4Pipeline, FlowMatchEulerDiscreteScheduler

from fewstep.distill.trainer import seeded
from fewstep.distill.transformer import TransformerConfig, TransformerTask, noise_levels


@pytest.fixture
def task(data, tiny_vae):
    torch.manual_seed(0)
    config = TransformerConfig(family="transformer", vae=str(tiny_vae), width=32, layers=2, heads=2, text_width=32)
    return TransformerTask(config, data)


def scrambled(task):
    """Away from the start, where every block is the identity and nothing could be told apart."""
    with torch.no_grad():
        for parameter in task.transformer.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=seeded(3)))
    return task


def test_at_the_start_it_predicts_nothing(task):
    batch = task.batch(torch.arange(8), seeded(0))
    expected = (batch["noise"] - batch["latents"]).square().mean()
    torch.testing.assert_close(task(batch)[0], expected)


def test_noise_and_target_are_those_of_diffusers_scheduler(task):
    """One Euler step along the target, from any level down to zero, gives the latents."""
    seen = {}
    task.predict = lambda noisy, sigmas, ids: seen.update(noisy=noisy, sigmas=sigmas) or torch.zeros_like(noisy)
    batch = task.batch(torch.arange(4), seeded(0))
    error, weight = task.errors(batch)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=seen["sigmas"].flip(0).tolist())
    noisy = scheduler.scale_noise(batch["latents"].flip(0), scheduler.timesteps, batch["noise"].flip(0))
    torch.testing.assert_close(seen["noisy"].flip(0), noisy)
    velocity = (seen["noisy"] - batch["latents"]) / seen["sigmas"].view(-1, 1, 1, 1)
    torch.testing.assert_close(error, velocity.square().mean(dim=(1, 2, 3)), rtol=1e-4, atol=1e-5)
    assert torch.equal(weight, torch.ones(4))


def test_training_asks_what_the_stock_pipeline_asks(task):
    """Same text, sizes and time: the first call of the pipeline's loop, done again by the task."""
    pipe, calls = scrambled(task).pipeline(), []
    pipe.set_progress_bar_config(disable=True)
    hook = task.transformer.register_forward_hook(
        lambda module, args, kwargs, output: calls.append((kwargs, output)), with_kwargs=True
    )
    prompts = ["thing1 of kind, noto style", "red"]
    pipe(prompts, num_inference_steps=4, guidance_scale=1.0, generator=seeded(0), output_type="latent")
    hook.remove()
    for kwargs, output in calls:
        sigmas = kwargs["timestep"] / 1000
        again = task.predict(kwargs["hidden_states"], sigmas, task.tokenize(prompts))
        torch.testing.assert_close(again, output[0], rtol=1e-4, atol=1e-5)
    assert len({kwargs["timestep"][0].item() for kwargs, _ in calls}) == 4


def test_a_caption_is_encoded_alike_beside_a_longer_one(task):
    pipe = task.pipeline()
    alone = pipe.encode_prompt("red", do_classifier_free_guidance=False)[0]
    beside = pipe.encode_prompt(["red", "thing1 of kind, noto style"], do_classifier_free_guidance=False)[0]
    torch.testing.assert_close(beside[:1], alone, rtol=1e-4, atol=1e-6)


def test_levels_are_logit_normal_but_for_an_even_share():
    times = (torch.arange(100_000) + 0.5) / 100_000
    levels = noise_levels(times, 0.2)
    even, bell = levels[:20_000], levels[20_000:]
    torch.testing.assert_close(even, torch.linspace(0, 1, 20_000), rtol=0, atol=1e-4)
    torch.testing.assert_close(bell.logit().std(), torch.tensor(1.0), rtol=0, atol=2e-3)
    torch.testing.assert_close(bell.quantile(0.8413), torch.tensor(1.0).sigmoid(), rtol=0, atol=1e-3)


def test_every_trained_parameter_is_read_and_every_read_one_trained(task):
    scrambled(task)(task.batch(torch.arange(4), seeded(0)))[0].backward()
    for name, parameter in task.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_the_result_loads_in_stock_diffusers(task, tmp_path):
    task.save(tmp_path / "pipe")
    pipe = CogView4Pipeline.from_pretrained(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == task.transformer.dtype == torch.float32
    image = pipe("thing1", num_inference_steps=2, generator=seeded(0), output_type="pt").images
    assert image.shape == (1, 3, 64, 64) and image.isfinite().all()
