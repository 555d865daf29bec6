"""The small decoder: its training form, its folding, and what it learns."""

import copy
import dataclasses
from importlib.resources import files
from typing import Any

import pytest
import torch
from diffusers import AutoencoderTiny
from torch import nn

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.config import read
from fewstep.distill.data import DataConfig
from fewstep.distill.decoder import DecoderConfig, DecoderTask, Normed, fold, psnr
from fewstep.distill.trainer import TrainConfig, seeded, train


@pytest.fixture
def task(data, tiny_vae):
    torch.manual_seed(0)
    return DecoderTask(DecoderConfig(vae=str(tiny_vae), width=8, blocks=(1, 1, 0, 0)), data)


def stir(task):
    """Normalisations as a training leaves them: nothing at its initial value."""
    for norm in (part for part in task.tiny.modules() if isinstance(part, nn.BatchNorm2d)):
        for tensor in (norm.weight.data, norm.bias.data, norm.running_mean):
            tensor.normal_()
        norm.running_var.uniform_(0.5, 2.0)


def test_folding_is_exact(task):
    stir(task)
    task.tiny.eval()
    folded, z = copy.deepcopy(task.tiny), torch.randn(3, 4, 8, 8)
    fold(folded)
    assert not any(isinstance(part, (Normed, nn.BatchNorm2d)) for part in folded.modules())
    with torch.no_grad():
        expected = task.tiny.decoder(z)
        assert (folded.decoder(z) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_training_goes_on_from_saved_weights(task, data, tiny_vae, tmp_path):
    """The same pictures at first, and every normalisation there again to be trained."""
    stir(task)
    task.save(tmp_path)
    again = DecoderTask(dataclasses.replace(task.config, start=str(tmp_path / "decoder")), data)
    stock: Any = AutoencoderTiny.from_pretrained(tmp_path / "decoder", torch_dtype=torch.float32)
    with torch.no_grad():
        expected, found = stock.decoder(again.probe), again.tiny.train().decoder(again.probe)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert {n for n, _ in again.tiny.named_parameters()} == {n for n, _ in task.tiny.named_parameters()}


def test_a_start_that_is_not_there_or_of_another_size_is_refused(task, data, tmp_path):
    with pytest.raises(InvalidConfig, match=r"no AutoencoderTiny at .*nowhere"):
        DecoderTask(dataclasses.replace(task.config, start=str(tmp_path / "nowhere")), data)
    task.save(tmp_path)
    with pytest.raises(InvalidConfig, match=r"decoder of .* has .* of shape .*8.*, \[model\] says .*16"):
        DecoderTask(dataclasses.replace(task.config, width=16, start=str(tmp_path / "decoder")), data)


def test_every_convolution_that_can_be_folded_into_is_normalised(task):
    """Not those that widen, which have no bias, and not the last, which makes the picture."""
    convs = [part for part in task.tiny.decoder.modules() if isinstance(part, nn.Conv2d)]
    normed = [part[0] for part in task.tiny.decoder.modules() if isinstance(part, Normed)]
    assert {id(c) for c in convs if c.bias is not None} - {id(c) for c in normed} == {id(task.tiny.decoder.layers[-1])}


def test_the_saved_decoder_is_stock_and_gives_what_was_validated(task, tmp_path):
    stir(task)
    task.save(tmp_path)
    stock = AutoencoderTiny.from_pretrained(tmp_path / "decoder")
    task.eval()
    task.measure()
    with torch.no_grad():
        expected, found = task.tiny.decoder(task.latents[0, :4]), stock.decode(task.latents[0, :4]).sample
    assert (found - expected).abs().max() < 5e-3 * expected.abs().max()  # weights in half precision
    assert task.tiny.decoder.layers[0][0].weight.dtype == torch.float32  # and the training goes on as it was


def test_statistics_are_those_of_the_weights_in_place(task):
    """Whatever training left; in evaluation the decoder then does what it does on that batch in training."""
    stir(task)
    task.measure()
    task.tiny.eval()
    with torch.no_grad():
        found = task.tiny.decoder(task.latents[0])
        expected = task.tiny.train().decoder(task.latents[0])
    assert (found - expected).abs().mean() < 0.05 * expected.std()


def test_pictures_and_latents_belong_together(task, data):
    """Latents are scaled to unit spread, and flipped with their picture."""
    assert abs(task.latents[0].std() - 1) < 1e-3
    batch = task.batch(torch.arange(16), seeded(3))
    vae = task.vae
    with torch.no_grad():
        expected = vae.encode(batch["images"]).latent_dist.mean * vae.config.scaling_factor
    torch.testing.assert_close(batch["latents"], expected, atol=1e-5, rtol=1e-4)


def test_it_learns_a_handful_of_pictures(task):
    optimizer, batch = torch.optim.AdamW(task.parameters(), 1e-2), task.batch(torch.arange(8), seeded(0))
    losses = []
    for _ in range(160):
        loss, _ = task(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_it_is_trained_by_the_common_loop(task, tmp_path):
    config = {"steps": 4, "batch_size": 4, "mixed_precision": "no", "sample_every": 2, "checkpoint_every": 2}
    final = train(task, TrainConfig(out=str(tmp_path / "run"), **config))
    log = (tmp_path / "run" / "log.csv").read_text()
    assert "psnr_held_out" in log and "psnr_full_decoder" in log
    assert AutoencoderTiny.from_pretrained(final / "decoder").config.latent_channels == 4


def test_psnr():
    assert psnr(torch.full((2, 3, 4, 4), 0.2), torch.zeros(2, 3, 4, 4)) == pytest.approx(20.0)


@pytest.mark.parametrize("change", [{"width": 0}, {"blocks": (1, -1)}])
def test_impossible_shapes_are_refused(change):
    with pytest.raises(InvalidConfig, match=r"model\.width must be 1 or more"):
        DecoderConfig(vae="x", **change)


def test_other_depths_are_refused(data, tiny_vae):
    with pytest.raises(InvalidConfig, match=r"model\.blocks must name 4 resolutions"):
        DecoderTask(DecoderConfig(vae=str(tiny_vae), blocks=(1, 1)), data)


def test_the_shipped_configuration_is_valid():
    file = str(files("fewstep.distill") / "configs" / "emoji-decoder.toml")
    found = read(file, train=TrainConfig, data=DataConfig, model=DecoderConfig)
    assert found["model"].blocks == (4, 4, 1, 0)
