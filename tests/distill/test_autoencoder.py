"""The autoencoder's loss and what it learns."""

import pytest
import torch

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.autoencoder import AutoencoderConfig, AutoencoderTask, edges, load_vae
from fewstep.distill.trainer import seeded


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


def test_a_decoder_trained_on_keeps_the_latents(data, tiny_vae, tmp_path):
    task = AutoencoderTask(AutoencoderConfig(encoder=str(tiny_vae)), data)
    before = {name: value.clone() for name, value in task.vae.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in task.parameters() if p.requires_grad], 1e-3)
    task(task.batch(torch.arange(8), seeded(0)))[0].backward()
    optimizer.step()
    changed = {name for name, value in task.vae.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all(name.startswith("decoder.") for name in changed)
    task.save(tmp_path)
    assert load_vae(str(tmp_path / "vae")).config.scaling_factor == load_vae(str(tiny_vae)).config.scaling_factor


def test_a_missing_autoencoder_is_named():
    with pytest.raises(InvalidConfig, match="no autoencoder at nowhere; train one"):
        load_vae("nowhere")
