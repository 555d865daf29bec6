"""When a row reuses: by its own past, whatever the policy is made of."""

import json
import math

import pytest

from fewstep import Recipe
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.errors import InvalidRecipe
from fewstep.accel.policy import Dynamic, Every, Listed, Past, Window, policy


def pattern(rule, sigmas, changes=()):
    """C computed, r reused, of a row that goes through `sigmas`; the first is computed."""
    past, seen = Past(), ""
    for i, sigma in enumerate(sigmas):
        past.evaluation, past.sigma = i, sigma
        past.change = changes[i] if changes else math.nan
        reused = i > 0 and rule.reuses(past)
        past.reused = past.reused + 1 if reused else 0
        seen += "r" if reused else "C"
    return seen


LEVELS = [8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.0]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Every(1), "CCCCCCCC"),
        (Every(3), "CrrCrrCr"),
        (Listed((0, 1, 5)), "CCrrrCrr"),
        (Every(3) & Window(4.0, 0.5), "CrrCrCCC"),
        (Every(8) & Listed((0, 3)), "CrrCrrrr"),
    ],
)
def test_patterns(rule, expected):
    assert pattern(rule, LEVELS) == expected


def test_a_change_below_the_threshold_is_reused_but_not_for_ever():
    changes = [math.nan, 0.1, 0.05, 0.05, 0.05, 0.3, 0.1, math.nan]
    assert pattern(Dynamic(0.2, max_consecutive=2), LEVELS, changes) == "CrrCrCrC"
    assert pattern(Dynamic(0.0), LEVELS, changes) == "CCCCCCCC"


def test_a_change_within_a_thousandth_of_the_threshold_is_a_tie():
    rule = Every(3) & Dynamic(0.2)
    assert [rule.ties(c) for c in (0.2, 0.2001, 0.1999, 0.21, math.nan)] == [True, True, True, False, False]
    assert not Every(3).ties(3.0)


def test_an_unknown_noise_level_lies_in_no_window():
    assert not Window().reuses(Past(sigma=math.nan))


@pytest.mark.parametrize(
    "rule", [Every(2), Listed((0, 4)), Window(3.0, 1.0), Dynamic(0.1, 2), Every(2) & Window() & Dynamic(0.5)]
)
def test_policies_go_through_json(rule):
    assert policy(json.loads(json.dumps(rule.settings()))) == rule
    recipe = Recipe(DeepCache(when=rule))
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Every(0), "Every.0.: n must be a whole number from 1 up"),
        (lambda: Every(2.5), "Every.2.5."),
        (lambda: Window(1.0, 2.0), "noise falls from start to stop"),
        (lambda: Listed((3, 1)), "in order"),
        (lambda: Dynamic(-1.0), "from 0 up"),
        (lambda: Dynamic(0.1, 0), "max_consecutive=0"),
        (lambda: policy({"policy": "often"}), "unknown policy 'often'; known: every, window"),
        (lambda: policy({"policy": "every", "k": 3}), "its settings are: n"),
    ],
)
def test_nonsense_is_refused_in_words(make, words):
    with pytest.raises(InvalidRecipe, match=words):
        make()
