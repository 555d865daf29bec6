"""Presets are resolved for the pipeline, promise what they say, and print."""

import pytest
import torch

from fewstep import AcceleratedPipeline
from fewstep.accel.errors import InvalidRecipe
from fewstep.accel.kernels.memory_format import ChannelsLast
from fewstep.accel.presets import PRESETS, preset
from fewstep.accel.target import Target
from fewstep.accel.technique import Fidelity
from fewstep.accel.zoo.tiny import FAMILIES, tiny


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_attaches_to_every_family(name, family):
    fast = AcceleratedPipeline(tiny(family), name)
    assert all(str(t) in fast.explain() for t in fast.recipe.techniques)
    fast.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_promises_rounding_at_most(family):
    found = preset("exact", Target.of_pipeline(tiny(family)))
    assert {t.fidelity for t in found.techniques} <= {Fidelity.EXACT, Fidelity.ROUNDING}


def test_presets_grow():
    target = Target.of_pipeline(tiny("sd"))
    names = [{t.name for t in preset(n, target).techniques} for n in ("exact", "precise", "balanced")]
    assert names[0] <= names[1] <= names[2] and "swap_scheduler" in names[2]
    steps = [preset(n, target).defaults["num_inference_steps"] for n in ("fast", "balanced")]
    assert steps[0] < steps[1]


def test_a_flow_model_keeps_its_own_solver(outputs):
    found = preset("balanced", Target.of_pipeline(tiny("flux")))
    assert "swap_scheduler" not in {t.name for t in found.techniques}


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(InvalidRecipe, match="known: exact, precise, balanced, fast"):
        AcceleratedPipeline(tiny("sd"), "quick")


def test_a_recipe_file_stands_in_for_a_preset(tmp_path, outputs):
    preset("exact", Target.of_pipeline(tiny("dit"))).save(tmp_path / "mine.json")
    fast = AcceleratedPipeline(tiny("dit"), tmp_path / "mine.json")
    assert torch.isfinite(outputs(fast, "dit").float()).all()


@pytest.mark.parametrize("slip", [ChannelsLast(), None, 3, ["exact"]])
def test_what_is_no_recipe_is_named(slip):
    with pytest.raises(InvalidRecipe, match=r"is no recipe: give Recipe\(\.\.\.\)"):
        AcceleratedPipeline(tiny("dit"), slip)
