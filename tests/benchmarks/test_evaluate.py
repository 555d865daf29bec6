"""An evaluation of tiny pipelines from end to end: every figure beside its floor or ceiling, and the pictures."""

import json

import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from fewstep.accel.zoo.tiny import tiny
from fewstep.benchmarks.data.reference import reference
from fewstep.benchmarks.evaluate import evaluate, pictures, rebuilt, sampled
from fewstep.benchmarks.metrics.judge import judged

COUNT = 20


class Emoji:
    """The emoji of the reference data at the size that a tiny pipeline draws; a few of them to compare with."""

    def __init__(self, side):
        data, self.side = reference(), side
        self.gallery, self.train, self.test = data.gallery, data.indices("train")[:40], data.indices("test")[:20]

    def images(self, places):
        return 2 * interpolate(self.gallery[places], (self.side, self.side), mode="nearest") - 1


@pytest.fixture(scope="module")
def pipe():
    made = tiny("sd")
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def side(pipe):
    return pipe("a", num_inference_steps=1, output_type="pt").images.shape[-1]


@pytest.fixture(scope="module")
def evaluated(pipe, side, tmp_path_factory):
    place = tmp_path_factory.mktemp("out") / "model"
    return place, evaluate(pipe, Emoji(side), place, count=COUNT, steps=2, guidance_scale=2.0)


def test_figures_are_complete(evaluated):
    found = json.loads(json.dumps(evaluated[1]))
    assert found["count"] == COUNT and found["setting"] == "plain / dpmpp_2m / 2 / 2"
    for split in ("train", "test"):
        names = ("top1", "top5", "group_accuracy", "style_accuracy")
        for row in (found[split], found[split]["ceiling"]):
            assert all(isinstance(row[k], float) for name in names for k in (name, f"{name}_floor"))
        assert found[split]["ceiling"]["psnr"] > 5
        assert set(found[split]["memorisation"]) == {"features", "pixels_psnr"}
    assert "floor" in found["train"]["kid_data"] and "floor" in found["train"]["frechet_data"]
    assert "kid_data" not in found["test"]


def test_the_judge_is_judged_on_real_pictures(evaluated, side):
    found, data, emoji = evaluated[1]["judge"]["test"], reference(), Emoji(side)
    assert set(found) == {f"{k}_accuracy{f}" for k in ("group", "style") for f in ("", "_floor")}
    again = judged(pictures(emoji, emoji.test), data.group[data.concept[emoji.test]], data.style[emoji.test])
    assert found == again


def test_pictures_are_written(evaluated, side):
    place = evaluated[0]
    for split in ("train", "test"):
        with Image.open(f"{place}-{split}.png") as grid:
            assert grid.size == (250 + 4 * side, 5 * side)
    with Image.open(f"{place}-memorised.png") as grid:
        assert grid.size == (170 + 8 * side, 4 * side)


def test_a_class_of_pipelines_has_its_solver_and_others_their_own(pipe):
    fast, setting = sampled(pipe, 50, 3.0)
    assert fast is not pipe and setting.scheduler == "dpmpp_2m" and setting.options["num_inference_steps"] == 50
    other = tiny("sd3")
    assert sampled(other, 50, 3.0)[0] is other
    assert sampled(other, 50, 3.0)[1].scheduler == type(other.scheduler).__name__


def test_true_pictures_go_through_the_autoencoder(pipe, side):
    real = pictures(Emoji(side), [3, 4])
    assert rebuilt(pipe, real).shape == real.shape and real.min() >= 0 and real.max() <= 1
    assert torch.equal(rebuilt(pipe, real), rebuilt(pipe, real))
