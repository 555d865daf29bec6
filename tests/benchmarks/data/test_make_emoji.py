"""Names, joins and drawing of the emoji set, on an icon set of three."""

import json

import pytest

from fewstep.accel.errors import FewstepError, MissingExtra
from fewstep.benchmarks.data import make_emoji
from fewstep.benchmarks.data.make_emoji import Concepts, choose, draw, install, rasterise, slug, svg

SQUARE = '<path fill="#f00" d="M0 0h16v16H0z"/>'


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def modules(tmp_path):
    labels = tmp_path / "emojibase-data"
    records = [
        {"label": "red apple", "hexcode": "1F34E", "group": 0, "subgroup": 0, "tags": ["fruit", "red"]},
        {"label": "flag: Peru", "hexcode": "1F1F5-1F1EA", "group": 0, "subgroup": 0},
        {"label": "no group", "hexcode": "1F3FB"},
    ]
    put(labels / "en/data.json", records)
    names = [{"order": 0, "message": "food & drink"}]
    put(labels / "en/messages.json", {"groups": names, "subgroups": names})
    for source in make_emoji.SHORTCODES:
        put(labels / f"en/shortcodes/{source}.json", {"1F34E": ["apple"]} if source == "github" else {})
    icons = {
        "apple": {"body": SQUARE, "hidden": True},
        "crimson-fruit": {"body": SQUARE},
        "flag-for-peru": {"body": SQUARE},
        "odd-thing": {"body": SQUARE},
        "odd-thing-dark": {"body": SQUARE},
    }
    put(tmp_path / "@iconify-json/set/icons.json", {"icons": icons, "width": 16, "height": 16})
    put(tmp_path / "@iconify-json/set/chars.json", {"1f34e": "crimson-fruit"})
    return tmp_path


def test_slug():
    assert slug("flag: São Tomé & Príncipe") == "flag-sao-tome-and-principe"
    assert slug("Mrs. Claus") == "mrs-claus"


def test_icons_join_by_code_then_name_and_never_hidden_before_shown(modules):
    concepts = Concepts(modules / "emojibase-data")
    found = [(p.concept, p.caption) for p in choose(modules, "set", 0, concepts)]
    assert sorted(found) == [(-1, "odd thing"), (0, "red apple"), (1, "flag: Peru")]  # no tone, apple once
    assert concepts.arrays["tags"].tolist() == ["fruit|red", ""]


def test_frame():
    sheet = {"width": 32, "icons": {"a": {"body": "<g/>", "left": 2}}}
    assert 'viewBox="2 0 32 16"' in svg(sheet, "a")


def test_drawn_on_white(modules):
    arrays = draw(modules, ("set",), 8)
    assert arrays["X"].shape == (3, 8, 8, 3) and (arrays["X"] == [255, 0, 0]).all()
    wide = svg({"icons": {"a": {"body": SQUARE, "width": 32, "height": 16}}}, "a")
    assert rasterise(wide, 8)[0, 0].tolist() == rasterise(wide, 8)[4, 7].tolist() == [255, 255, 255]


def test_missing_npm_and_its_failure_are_said(monkeypatch, tmp_path):
    monkeypatch.setattr(make_emoji.shutil, "which", lambda name: None)
    with pytest.raises(MissingExtra, match="npm is needed"):
        install(tmp_path, {})
    monkeypatch.setattr(make_emoji.shutil, "which", lambda name: "false")
    with pytest.raises(FewstepError, match="npm install failed"):
        install(tmp_path, {})
