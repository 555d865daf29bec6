"""The autoencoder's loss and what it learns."""

import torch

from fewstep.distill.autoencoder import AutoencoderConfig, AutoencoderTask, edges
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
