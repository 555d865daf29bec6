"""A recipe is a value: sorted, checked before any model is loaded, and the same after a round trip."""

import dataclasses
import json

import pytest

from fewstep.accel import catalog
from fewstep.accel.cache.cross_attention import CrossAttentionCache
from fewstep.accel.cache.text import TextCache
from fewstep.accel.errors import InvalidRecipe
from fewstep.accel.recipe import FORMAT, Recipe

ALL = [catalog.example(name) for name in catalog.TECHNIQUES]


def test_techniques_are_sorted_by_stage_whatever_the_order_given():
    owners = {claim: technique for technique in ALL for claim in technique.claims}
    peaceful = [t for t in ALL if all(owners[claim] is t for claim in t.claims)]
    recipe = Recipe(*reversed(peaceful))
    stages = [t.stage for t in recipe.techniques]
    assert stages == sorted(stages) and set(recipe.techniques) == set(peaceful)


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_two_owners_of_a_seam_are_refused(technique):
    if not technique.claims:
        pytest.fail(f"{technique.name} claims nothing: two of it would both act")
    with pytest.raises(InvalidRecipe, match="both own"):
        Recipe(technique, technique)


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_json_round_trip(technique, tmp_path):
    recipe = Recipe(technique, num_inference_steps=7)
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == recipe


@pytest.mark.parametrize("technique", ALL, ids=lambda t: t.name)
def test_techniques_are_frozen(technique):
    with pytest.raises(dataclasses.FrozenInstanceError):
        technique.anything = 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"format": FORMAT + 1, "techniques": []}, "update fewstep"),
        ({"techniques": [{"name": "nonsense"}]}, "known: text_cache"),
        ({"techniques": [{"name": "text_cache", "size": 3}]}, "max_bytes"),
        ([], "JSON object"),
    ],
)
def test_unusable_files_say_why(data, words, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(data))
    with pytest.raises(InvalidRecipe, match=words):
        Recipe.load(tmp_path / "recipe.json")


def test_unreadable_files_say_why(tmp_path):
    with pytest.raises(InvalidRecipe, match="no recipe at"):
        Recipe.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidRecipe, match="not valid JSON"):
        Recipe.load(tmp_path / "bad.json")


def test_classes_are_not_techniques():
    with pytest.raises(InvalidRecipe, match="instances"):
        Recipe(TextCache)


def test_call_defaults_and_sum():
    both = Recipe(TextCache(), guidance_scale=2.0) + Recipe(CrossAttentionCache(), guidance_scale=4.0)
    assert dict(both.defaults) == {"guidance_scale": 4.0} and len(both.techniques) == 2
    assert str(both) == "Recipe(TextCache(), CrossAttentionCache(), guidance_scale=4.0)"
