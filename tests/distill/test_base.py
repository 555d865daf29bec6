"""The models that are trained: what they learn from, what they lose, and that stock diffusers loads the result."""

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline

from fewstep.distill.autoencoder import AutoencoderConfig, AutoencoderTask, edges
from fewstep.distill.base import BaseConfig, BaseTask, loss_weight, zero_snr_scheduler
from fewstep.distill.data import GROUPS, DataConfig, EmojiData
from fewstep.distill.ema import Ema
from fewstep.distill.tokenizer import word_tokenizer
from fewstep.distill.trainer import seeded


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Forty pictures: ten concepts in four styles, one concept of a group that is left out."""
    path, rng = tmp_path_factory.mktemp("data") / "emoji.npz", np.random.default_rng(0)
    labels = np.array([f"thing{i} of kind" for i in range(10)])
    np.savez(
        path,
        X=np.broadcast_to(rng.integers(0, 256, (40, 1, 1, 3), dtype=np.uint8), (40, 64, 64, 3)),
        style=np.arange(40) % 4,
        concept=np.arange(40) // 4,
        styles=np.array(["noto", "twemoji", "fluent-emoji", "fxemoji"]),
        labels=labels,
        tags=np.array(["red|round"] * 9 + [""]),
        group=np.array([*GROUPS, GROUPS[0], GROUPS[0], GROUPS[1], "flags"]),
    )
    return EmojiData(DataConfig(path=str(path), held_out=0.2))


def test_the_split_keeps_each_concept_in_training(data):
    assert len(data.concept) == 36 and len(data.test) == 7 and len(data.train) == 29
    assert not set(data.test) & set(data.train)
    assert set(data.concept[data.test]) <= set(data.concept[data.train])
    assert data.caption(5) == "thing1 of kind, twemoji style"


def test_the_tokenizer_keeps_known_words_whole_and_loses_no_unknown_one():
    tokenizer = word_tokenizer(["red apple, noto style", "green tree"], max_length=12)
    pieces = tokenizer.tokenize("red apple, noto style green tree")
    assert [p.removesuffix("</w>") for p in pieces] == ["red", "apple", ",", "noto", "style", "green", "tree"]
    assert tokenizer.decode(tokenizer("zebra é").input_ids, skip_special_tokens=True).replace(" ", "") == "zebraé"
    assert len(tokenizer("red " * 50, truncation=True).input_ids) == 12


def test_the_tokenizer_survives_saving(tmp_path):
    from transformers import CLIPTokenizer

    tokenizer = word_tokenizer(["red apple, noto style"], max_length=12)
    tokenizer.save_pretrained(tmp_path)
    assert CLIPTokenizer.from_pretrained(tmp_path)("a red apple").input_ids == tokenizer("a red apple").input_ids


def test_the_loss_weight_is_positive_at_zero_snr_and_min_snr_elsewhere():
    alphas = zero_snr_scheduler().alphas_cumprod.double()
    weight, snr = loss_weight(alphas, 5.0), alphas / (1 - alphas)
    assert alphas[-1] == 0 and weight[-1] == 1
    torch.testing.assert_close(weight, (snr + 1).clamp(max=5) / (snr + 1))


def test_the_velocity_target_is_diffusers_own(data, tiny_vae):
    task = BaseTask(small(tiny_vae), data)
    batch = task.batch(torch.arange(4), seeded(0))
    reference = DDIMScheduler.from_config(task.scheduler.config)
    noisy = reference.add_noise(batch["latents"], batch["noise"], batch["timesteps"])
    velocity = reference.get_velocity(batch["latents"], batch["noise"], batch["timesteps"])
    text = task.text_encoder(batch["ids"]).last_hidden_state
    error = (task.unet(noisy, batch["timesteps"], text).sample - velocity).square().mean(dim=(1, 2, 3))
    weight = loss_weight(reference.alphas_cumprod[batch["timesteps"]], 5.0)
    torch.testing.assert_close(task(batch)[0], (weight * error).mean(), rtol=1e-4, atol=1e-6)


def test_captions_are_dropped_swapped_and_stripped_at_their_rates(data, tiny_vae):
    task, rng = BaseTask(small(tiny_vae), data), seeded(1)
    seen = [task.caption(0, rng) for _ in range(4000)]
    assert abs(sum(c == "" for c in seen) / 4000 - 0.1) < 0.02
    assert abs(sum(c.startswith(("red", "round")) for c in seen) / 3600 - 0.15) < 0.03
    assert abs(sum("style" not in c and c != "" for c in seen) / 3600 - 0.1) < 0.02


def test_timesteps_are_stratified(data, tiny_vae):
    timesteps = BaseTask(small(tiny_vae), data).batch(torch.arange(20) % 20, seeded(0))["timesteps"]
    assert torch.equal(timesteps // 50, torch.arange(20))


def test_the_result_loads_in_stock_diffusers(data, tiny_vae, tmp_path):
    task = BaseTask(small(tiny_vae), data)
    task.save(tmp_path / "pipe")
    assert task.unet.dtype == torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(tmp_path / "pipe")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.unet.dtype == pipe.text_encoder.dtype == torch.float32
    image = pipe("thing1", num_inference_steps=2, generator=seeded(0), output_type="pt").images
    assert image.shape == (1, 3, 64, 64) and image.isfinite().all()


def small(vae):
    return BaseConfig(vae=str(vae), widths=(32, 32), text_width=32, heads=2, text_layers=1)


@pytest.fixture(scope="module")
def tiny_vae(data, tmp_path_factory):
    task = AutoencoderTask(AutoencoderConfig(widths=(8, 8, 8, 8), latent_channels=4), data)
    folder = tmp_path_factory.mktemp("vae")
    task.save(folder)
    return folder / "vae"


def test_the_scaling_factor_gives_unit_latents(data, tiny_vae):
    task = BaseTask(small(tiny_vae), data)
    assert abs(task.latents.std() - 1) < 1e-3


def test_the_autoencoder_learns(data):
    torch.manual_seed(0)
    task = AutoencoderTask(AutoencoderConfig(widths=(8, 8, 8, 8), latent_channels=4), data)
    optimizer, batch = torch.optim.AdamW(task.parameters(), 3e-3), task.batch(torch.arange(8), seeded(0))
    losses = []
    for _ in range(60):
        loss, _ = task(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_edges_of_a_constant_error_are_nothing():
    assert edges(torch.ones(1, 3, 4, 4)) == 0
    assert edges(torch.arange(4.0).expand(1, 3, 4, 4)) == 1


def test_the_average_is_the_closed_form_and_moves_in_half_precision():
    layer = torch.nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    ema = Ema(layer, 0.999)
    with torch.no_grad():
        layer.weight.fill_(2.0)
    expected = 1.0
    for step in range(200):
        ema.update(layer)
        decay = min(0.999, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * 2.0
    assert abs(ema.shadow["weight"].item() - expected) < 1e-5
    with ema.applied(layer):
        assert layer.weight.item() == ema.shadow["weight"].bfloat16().item()
    assert layer.weight.item() == 2.0
