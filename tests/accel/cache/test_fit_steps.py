"""The search of computed steps: against brute force, on real pipelines, and its command."""

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from fewstep import AcceleratedPipeline, Recipe
from fewstep.accel import fit
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.cache.fit_steps import Trials, moves, search, searched, settable, starts
from fewstep.accel.cache.forecast import Forecast
from fewstep.accel.errors import InvalidConfig, InvalidRecipe
from fewstep.accel.policy import Every, Listed
from fewstep.accel.zoo.tiny import tiny

STEPS = 7
CALL = {"num_inference_steps": STEPS, "height": 32, "width": 32}


def every_mask(total, computed):
    return [(0, *rest) for rest in itertools.combinations(range(1, total), computed - 1)]


def gaps(total, weights):
    """What linear interpolation from each computed evaluation to the next leaves over, weighted: smooth, as features
    are."""

    def distance(mask):
        ends = (*mask, total)
        return sum(weights[i] * (i - a) ** 2 for a, b in itertools.pairwise(ends) for i in range(a, b))

    return distance


@pytest.mark.parametrize("computed", [1, 2, 4, 9])
@pytest.mark.parametrize("power", [-1.5, 0.0, 1.5])
def test_a_smooth_distance_is_searched_to_its_least(power, computed):
    total = 12
    distance = gaps(total, [(1 + i) ** power for i in range(total)])
    *_, (mask, level) = search(distance, total, computed)
    assert level == min(map(distance, every_mask(total, computed)))
    assert level == distance(mask) and len(mask) == computed


def test_each_mask_is_tried_once_and_each_that_comes_out_is_nearer():
    tried = []

    def distance(mask):
        tried.append(mask)
        return gaps(12, [1 + (5 * i) % 7 for i in range(12)])(mask)

    levels = [level for _, level in search(distance, 12, 5)]
    assert levels == sorted(set(levels), reverse=True)
    assert len(tried) == len(set(tried)) < len(every_mask(12, 5))


@pytest.mark.parametrize(("total", "computed"), [(1, 1), (2, 2), (25, 1), (25, 2), (25, 9), (25, 24), (25, 25)])
def test_starts_and_moves_are_masks_of_the_asked_size(total, computed):
    found = starts(total, computed)
    assert found == list(dict.fromkeys(found))
    for mask in found:
        near = [m for place in range(1, computed) for m in moves(mask, place, total)]
        for one in (mask, *near):
            assert len(one) == computed and one[0] == 0 and one[-1] < total
            assert list(one) == sorted(set(one))


def trials(family, recipe, **options):
    return Trials(tiny(family), recipe, ["a red fox", "sand"], seed=3, **CALL | options)


@pytest.mark.parametrize(("family", "recipe"), [("sd", Recipe(DeepCache())), ("flux", Recipe(Forecast(damping=0)))])
def test_on_a_pipeline_no_single_move_is_better(family, recipe):
    tried = trials(family, recipe)
    assert tried.total == STEPS
    *_, (mask, level) = search(tried.distance, STEPS, 3)
    assert level <= min(tried.distance(start) for start in starts(STEPS, 3))
    for place in (1, 2):
        assert level <= min(map(tried.distance, moves(mask, place, STEPS)))
    assert tried.distance(tuple(range(STEPS))) < -100  # computes all: equal


def test_the_distance_is_that_of_the_latents(tmp_path):
    """By hand: a recipe with that mask beside the plain pipeline."""
    tried = trials("sd", Recipe(DeepCache()), guidance_scale=4.0)
    found = []
    for pipe in (tiny("sd"), AcceleratedPipeline(tiny("sd"), Recipe(DeepCache(when=Listed((0, 3)))))):
        for seed, prompt in ((3, "a red fox"), (4, "sand")):
            rng = torch.Generator().manual_seed(seed)
            call = CALL | {"output_type": "latent", "guidance_scale": 4.0, "generator": rng}
            found.append(pipe(prompt, **call).images.double())
    noise = [(found[i + 2] - found[i]).square().mean() / found[i].var() for i in (0, 1)]
    assert tried.distance((0, 3)) == pytest.approx(float(10 * torch.stack(noise).log10().mean()), abs=1e-3)


def test_a_solver_with_two_evaluations_a_step_has_that_many():
    from fewstep.accel.solver import SwapScheduler

    assert trials("sd", Recipe(SwapScheduler("heun"), DeepCache())).total == 2 * STEPS - 1


def test_what_was_stopped_goes_on_from_its_recipe(tmp_path):
    out = tmp_path / "recipe.json"
    first = searched(trials("sd", Recipe(DeepCache())), 3, out)
    again = searched(trials("sd", Recipe.load(out)), 3, out)
    assert again["computed"] == first["computed"] and again["db"] == first["db"] <= first["even_db"]
    other = searched(trials("sd", Recipe.load(out)), 4, out)
    assert len(other["computed"]) == 4


def test_a_recipe_without_a_policy_to_set_is_refused():
    assert settable("forecast") == Recipe(Forecast())
    assert settable("deep-cache") == Recipe(DeepCache())
    with pytest.raises(InvalidRecipe, match="has a policy `when`"):
        settable("exact")
    with pytest.raises(InvalidRecipe, match="has a policy `when`"):
        settable("channels_last")
    with pytest.raises(InvalidRecipe, match="is no recipe"):
        settable("fourcast")


def test_more_computed_evaluations_than_there_are_are_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="these calls have 7 evaluations"):
        searched(trials("sd", Recipe(DeepCache(when=Every(2)))), 8, tmp_path / "recipe.json")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_recipe_that_holds_its_number_of_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny("sd").save_pretrained("model")
    (tmp_path / "words.txt").write_text("a red fox\n")
    arguments = ["steps", "model", "--prompts", "words.txt", "--steps", "5", "--computed", "2", "--device", "cpu"]
    result = CliRunner().invoke(fit.app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    recipe = Recipe.load("recipe.json")
    assert recipe == Recipe(Forecast(when=Listed(tuple(found["computed"]))), num_inference_steps=5)
    told = CliRunner().invoke(fit.app, [*arguments, "--guidance", "2"]).output
    assert "2 of 5 evaluations computed" in told and "evenly spaced" in told
