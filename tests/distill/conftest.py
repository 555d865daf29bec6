"""A toy task with everything that a real one has, and a toy data set with its autoencoder."""

import numpy as np
import pytest
import torch
from torch import nn

from fewstep.distill.autoencoder import AutoencoderConfig, AutoencoderTask
from fewstep.distill.data import GROUPS, DataConfig, EmojiData
from fewstep.distill.trainer import Task, TrainConfig


class Line(Task):
    """Fits a line through noisy points."""

    def __init__(self):
        super().__init__()
        self.model = nn.Linear(1, 1)
        nn.init.zeros_(self.model.weight), nn.init.zeros_(self.model.bias)
        self.x = torch.linspace(-1, 1, 50)[:, None]
        self.seen = []

    def __len__(self):
        return len(self.x)

    def batch(self, indices, rng):
        self.seen.append(indices.tolist())
        x = self.x[indices]
        return {"x": x, "y": 3 * x + 1 + 0.01 * torch.randn(x.shape, generator=rng)}

    def forward(self, batch):
        loss = (self.model(batch["x"]) - batch["y"]).square().mean()
        return loss, {"error": loss.detach()}

    def validate(self):
        return {"slope": self.model.weight.item()}

    def sample(self):
        return torch.zeros(8, 3, 4, 4)

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / "line.pt")


@pytest.fixture
def line():
    return Line


@pytest.fixture
def config(tmp_path):
    def make(**changes):
        settings = {"out": str(tmp_path / "run"), "steps": 20, "batch_size": 8, "learning_rate": 0.1, "warmup_steps": 2}
        settings |= {"mixed_precision": "no", "log_every": 5, "sample_every": 10, "checkpoint_every": 5}
        return TrainConfig(**settings | changes)

    return make


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def tiny_vae(data, tmp_path_factory):
    task = AutoencoderTask(AutoencoderConfig(widths=(8, 8, 8, 8), latent_channels=4), data)
    folder = tmp_path_factory.mktemp("vae")
    task.save(folder)
    return folder / "vae"
