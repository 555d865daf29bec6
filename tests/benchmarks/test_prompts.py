"""Captions drawn by seed, prompts of a file, and errors in words; of the command line's lists too."""

import pytest

from fewstep.accel.errors import InvalidConfig
from fewstep.accel.zoo.embedded import EMBEDDED
from fewstep.benchmarks.cli import numbers, words
from fewstep.benchmarks.data.reference import reference
from fewstep.benchmarks.prompts import choose, drawn


@pytest.mark.parametrize("split", ["train", "test"])
def test_drawn_captions_belong_to_the_split_and_to_their_pictures(split):
    prompts, data = drawn(split, 30, seed=3), reference()
    assert len(set(prompts.places)) == 30 and set(prompts.places) <= set(data.indices(split).tolist())
    assert prompts.captions == [data.caption(i) for i in prompts.places]
    assert prompts.concepts == [int(data.concept[i]) for i in prompts.places]
    assert prompts.styles == [int(data.style[i]) for i in prompts.places]


def test_seed_decides_and_fewer_are_the_first_of_more():
    assert drawn("train", 8, 1) == drawn("train", 8, 1) != drawn("train", 8, 2)
    assert drawn("train", 20, 1).captions[:8] == drawn("train", 8, 1).captions


def test_file_is_repeated_to_the_count(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("a café\n\n  two  \n", encoding="utf-8")
    prompts = choose("some/model", file, "train", 5, 0)
    assert prompts.captions == ["a café", "two", "a café", "two", "a café"]
    assert prompts.concepts is None and prompts.places is None


@pytest.mark.parametrize("model", EMBEDDED)
def test_embedded_models_have_captions_of_their_own(model):
    assert choose(model, None, "test", 4, 0) == drawn("test", 4, 0)


def test_refusals(tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    cases = {
        "give --prompts FILE for some/model: only embedded models": ("some/model", None, "train", 4),
        "no such file": ("m", tmp_path / "absent.txt", "train", 4),
        "there is no": ("m", tmp_path, "train", 4),
        "holds no prompts": ("m", tmp_path / "empty.txt", "train", 4),
        "not one of train, test": ("emoji-unet", None, "valid", 4),
        "is more than the": ("emoji-unet", None, "test", 10**6),
    }
    for message, (model, file, split, count) in cases.items():
        with pytest.raises(InvalidConfig, match=message):
            choose(model, file, split, count, 0)


def test_lists_hold_each_value_once():
    assert words("--schedulers", " ddim, euler,,ddim ") == ("ddim", "euler")
    assert numbers("--steps", "4, 8,4", int) == (4, 8)
    assert numbers("--guidance", "1,7.5", float) == (1.0, 7.5)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("4,x", int, "must be whole numbers with commas"),
        ("2.5", int, "must be whole numbers"),
        ("a", float, "must be numbers"),
        ("0", int, "must hold positive numbers"),
        ("-1", float, "must hold positive numbers"),
        ("nan", float, "must hold positive numbers"),
        ("inf", float, "must hold positive numbers"),
        (" , ", int, "--x is empty"),
    ],
)
def test_bad_numbers_are_refused_in_words(text, kind, message):
    with pytest.raises(InvalidConfig, match=message):
        numbers("--x", text, kind)
