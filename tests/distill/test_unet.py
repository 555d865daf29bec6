"""The UNet family: its target and weight are the published ones, and stock diffusers loads the result."""

import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from fewstep.distill.trainer import seeded
from fewstep.distill.unet import UnetConfig, UnetTask, loss_weight, zero_snr_scheduler


@pytest.fixture(scope="module")
def task(data, tiny_vae):
    torch.manual_seed(0)
    config = UnetConfig(family="unet", vae=str(tiny_vae), widths=(32, 32), text_width=32, heads=2, text_layers=1)
    return UnetTask(config, data)


def test_the_loss_weight_is_positive_at_zero_snr_and_min_snr_elsewhere():
    alphas = zero_snr_scheduler().alphas_cumprod.double()
    weight, snr = loss_weight(alphas, 5.0), alphas / (1 - alphas)
    assert alphas[-1] == 0 and weight[-1] == 1
    torch.testing.assert_close(weight, (snr + 1).clamp(max=5) / (snr + 1))


def test_the_velocity_target_is_diffusers_own(task):
    batch = task.batch(torch.arange(4), seeded(0))
    timesteps = (batch["times"] * 1000).long()
    reference = DDIMScheduler.from_config(task.scheduler.config)
    noisy = reference.add_noise(batch["latents"], batch["noise"], timesteps)
    velocity = reference.get_velocity(batch["latents"], batch["noise"], timesteps)
    text = task.text_encoder(batch["ids"]).last_hidden_state
    error = (task.unet(noisy, timesteps, text).sample - velocity).square().mean(dim=(1, 2, 3))
    weight = loss_weight(reference.alphas_cumprod[timesteps], 5.0)
    torch.testing.assert_close(task(batch)[0], (weight * error).mean(), rtol=1e-4, atol=1e-6)


def test_the_result_loads_in_stock_diffusers(task, tmp_path):
    task.save(tmp_path / "pipe")
    assert task.unet.dtype == torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.float32
    image = pipe("thing1", num_inference_steps=2, generator=seeded(0), output_type="pt").images
    assert image.shape == (1, 3, 64, 64) and image.isfinite().all()
