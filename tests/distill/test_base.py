"""What every base model learns from: captions, latents and evenly spread times."""

import pytest
import torch

from fewstep.distill.trainer import seeded
from fewstep.distill.unet import UnetConfig, UnetTask


@pytest.fixture(scope="module")
def task(data, tiny_vae):
    return UnetTask(UnetConfig(family="unet", vae=str(tiny_vae), widths=(32, 32), text_width=32, heads=2), data)


def test_captions_are_dropped_swapped_and_stripped_at_their_rates(task):
    rng = seeded(1)
    seen = [task.caption(0, rng) for _ in range(4000)]
    assert abs(sum(c == "" for c in seen) / 4000 - 0.1) < 0.02
    assert abs(sum(c.startswith(("red", "round")) for c in seen) / 3600 - 0.15) < 0.03
    assert abs(sum("style" not in c and c != "" for c in seen) / 3600 - 0.1) < 0.02


def test_times_are_stratified(task):
    times = task.batch(torch.arange(20), seeded(0))["times"]
    assert torch.equal((times * 20).long(), torch.arange(20))


def test_the_scaling_factor_gives_unit_latents(task):
    assert abs(task.latents.std() - 1) < 1e-3
