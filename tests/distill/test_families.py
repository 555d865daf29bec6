"""A base model is trained from noise, or goes on from a saved pipeline."""

import dataclasses

import pytest
import torch

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.families import task_of
from fewstep.distill.transformer import TransformerConfig
from fewstep.distill.unet import UnetConfig


@pytest.fixture(params=["unet", "transformer"])
def config(request, tiny_vae):
    common = {"family": request.param, "vae": str(tiny_vae), "text_width": 32, "heads": 2}
    if request.param == "unet":
        return UnetConfig(widths=(32, 32), **common)
    return TransformerConfig(width=32, layers=2, **common)


def weights(task):
    return {n: v for n, v in task.state_dict().items() if v.is_floating_point()}


def test_it_goes_on_from_what_a_training_saved(config, data, tmp_path):
    torch.manual_seed(1)
    first = task_of(config, data)
    first.tokenizer.model_max_length = 7  # tells it from a tokenizer made anew
    for value in first.parameters():
        value.data.add_(0.01 * torch.randn_like(value))
    first.save(tmp_path / "final")
    other = task_of(config, data)
    again = task_of(dataclasses.replace(config, start=str(tmp_path / "final")), data)
    assert all(v.dtype == torch.float32 for v in weights(again).values())
    assert again.tokenizer.model_max_length == 7 and again.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    for name, value in weights(first).items():
        assert torch.equal(weights(again)[name], value.half().float()), name
    assert any(not torch.equal(weights(other)[n], v) for n, v in weights(again).items())


def test_a_start_that_does_not_fit_is_refused_in_words(config, data, tmp_path):
    with pytest.raises(InvalidConfig, match=r"no pipeline folder at .*nowhere"):
        task_of(dataclasses.replace(config, start=str(tmp_path / "nowhere")), data)
    task_of(dataclasses.replace(config, text_width=64), data).save(tmp_path / "wider")
    with pytest.raises(InvalidConfig, match=r"of shape .*\[model\] says"):
        task_of(dataclasses.replace(config, start=str(tmp_path / "wider")), data)


def test_a_start_of_the_other_family_is_refused(config, data, tiny_vae, tmp_path):
    other = UnetConfig if config.family == "transformer" else TransformerConfig
    family = "unet" if other is UnetConfig else "transformer"
    task_of(other(family=family, vae=str(tiny_vae), text_width=32, heads=2), data).save(tmp_path / "other")
    with pytest.raises(InvalidConfig, match=r"is a saved .*Pipeline"):
        task_of(dataclasses.replace(config, start=str(tmp_path / "other")), data)
