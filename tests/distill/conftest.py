"""A toy task with everything that a real one has: random augmentation, a frozen part, validation, pictures."""

import pytest
import torch
from torch import nn

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
