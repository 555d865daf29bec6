"""The shipped judge tells groups and styles of real pictures, even of the gallery's 16x16; what is spoilt falls."""

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from fewstep.accel.errors import Unsupported
from fewstep.benchmarks.data.reference import reference
from fewstep.benchmarks.metrics.judge import FOLDER, judge, judged, verdicts
from fewstep.benchmarks.prompts import Prompts
from fewstep.benchmarks.quality import meaning


@pytest.fixture(scope="module")
def held_out():
    """Every held-out picture, its group and its style."""
    data = reference()
    places = data.indices("test")
    images = interpolate(data.gallery[places], (64, 64), mode="bicubic").clamp(0, 1)
    return images, data.group[data.concept[places]], data.style[places]


def test_its_names_are_the_reference_data_s():
    assert judge().config["groups"] == reference().groups
    assert judge().config["styles"] == reference().styles
    assert (FOLDER / "model.safetensors").stat().st_size < 1e6


def test_held_out_pictures_are_told_apart(held_out):
    found = judged(*held_out)
    assert found["group_accuracy"] > 0.5 and found["style_accuracy"] > 0.5
    assert 0 < found["group_accuracy_floor"] < 0.05


def test_spoilt_pictures_fall(held_out):
    images, groups, styles = held_out
    blots = interpolate(avg_pool2d(images, 32), (64, 64), mode="bilinear")
    good, bad = judged(images, groups, styles), judged(blots, groups, styles)
    assert bad["group_accuracy"] < good["group_accuracy"] - 0.15
    assert bad["style_accuracy"] < good["style_accuracy"] - 0.15


def test_wrong_captions_are_at_chance(held_out):
    images, groups, styles = held_out
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    found = judged(images, groups[order], styles[order])
    assert found["group_accuracy"] < 0.3 and found["style_accuracy"] < 0.25


def test_pictures_of_any_size_and_only_pictures(held_out):
    small = verdicts(avg_pool2d(held_out[0][:40], 2))
    large = verdicts(interpolate(held_out[0][:40], scale_factor=4, mode="bicubic").clamp(0, 1))
    assert (small["group"] == large["group"]).float().mean() > 0.8
    with pytest.raises(Unsupported, match=r"floats in 0\.\.1"):
        verdicts(torch.zeros(1, 3, 64, 64, dtype=torch.uint8))


def test_the_group_of_a_concept_is_what_a_sweep_asks_for(held_out):
    data = reference()
    places = data.indices("test")[:60]
    prompts = Prompts(
        captions=[data.caption(i) for i in places],
        places=places.tolist(),
        concepts=data.concept[places].tolist(),
        styles=data.style[places].tolist(),
    )
    images, groups, styles = (part[:60] for part in held_out)
    assert judged(images, groups, styles).items() <= meaning(images, prompts).items()
