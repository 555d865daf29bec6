"""The race with other libraries: compared at equal quality, on curves; what a peer raises is a row."""

import json
import math

import pytest

from fewstep import Recipe
from fewstep.accel import catalog
from fewstep.accel.cache.deep import DeepCache
from fewstep.accel.policy import Every
from fewstep.accel.zoo import embedded
from fewstep.accel.zoo.tiny import tiny
from fewstep.benchmarks import head_to_head
from fewstep.benchmarks.head_to_head import HeadToHead, Point, Race, at, front, ratios, summary, write
from fewstep.benchmarks.peers import FITTED, OURS, PEERS, Ours, Peer, fitted
from fewstep.benchmarks.prompts import drawn


def curve(factor, ours, psnrs=(60, 50, 40, 30), name="a"):
    """Speed doubles each 10 dB down from 60."""
    speeds = [factor * 2 ** ((60 - p) / 10) for p in psnrs]
    pairs = zip(psnrs, speeds, strict=True)
    return [
        Point(contender=name, setting=str(p), ours=ours, psnr=p, speed=s, low=s * 0.98, high=s * 1.02) for p, s in pairs
    ]


def test_between_two_settings_the_logarithm_of_the_speed_is_linear():
    log, spread = at(curve(1.0, True), 45.0)
    assert math.exp(log) == pytest.approx(2**1.5) and spread == pytest.approx(math.log(1.02 / 0.98) / 2)
    assert at(curve(1.0, True), 65.0) is None and at(curve(1.0, True), 25.0) is None


def test_a_contender_that_is_a_fifth_faster_everywhere_is_so_at_every_quality():
    found = ratios(curve(1.2, True), curve(1.0, False, psnrs=(55, 45, 35)))
    assert [f["psnr"] for f in found] == [55, 45, 35]
    assert all(f["ratio"] == pytest.approx(1.2) and f["low"] < 1.2 < f["high"] for f in found)


def test_a_setting_that_another_beats_is_not_on_the_front():
    beaten = Point(contender="a", setting="x", ours=True, psnr=45, speed=1.1, low=1, high=1.2)
    failed = Point(contender="a", setting="y", ours=True, error="RuntimeError: no")
    assert front([*curve(1.0, True), beaten, failed]) == curve(1.0, True)


def test_best_is_made_of_all_contenders_of_a_side():
    points = curve(1.0, True, name="DeepCache") + curve(1.3, True, name="Forecast, UNet")
    points += curve(1.0, False, name="DeepCache 0.1.1")
    found = summary(points)
    assert all(f["ratio"] == pytest.approx(1.3) for f in found["best / best"]) and len(found["best / best"]) == 4
    assert all(f["ratio"] == pytest.approx(1.0) for f in found["DeepCache / DeepCache 0.1.1"])


def test_every_cache_of_the_catalog_has_an_opponent_or_is_exact_or_has_none():
    """CrossAttentionGate's peer wants a method of its own in place of the pipeline's call, and drops guidance too."""
    raced = {type(recipe.techniques[0]).name for ours in OURS.values() for recipe in ours.recipes("emoji-unet", 25)}
    caches = {name for name, place in catalog.TECHNIQUES.items() if place.startswith(".cache.")}
    assert caches - raced == {"text_cache", "cross_attention_cache", "cross_attention_gate"}
    assert all(peer in PEERS for ours in OURS.values() for peer in ours.against)
    assert all(ours.on == PEERS[peer].on for ours in OURS.values() for peer in ours.against)


@pytest.mark.parametrize("model", embedded.EMBEDDED)
def test_fitted_recipes_are_of_the_model_its_steps_and_captions_that_no_race_draws(model):
    found = fitted(model, 25)
    assert [len(recipe.techniques[0].when.computed) for recipe in found] and fitted("elsewhere", 25) == []
    assert all(dict(recipe.defaults) == {"num_inference_steps": 25} for recipe in found)
    assert all(recipe.techniques[0].when.computed[-1] < 25 for recipe in found)
    captions = (FITTED / "captions.txt").read_text().splitlines()
    assert captions and not [count for count in (12, 24, 32) if set(captions) & set(drawn("train", count, 0).captions)]


@pytest.fixture
def small(monkeypatch):
    """Two contenders of two settings each on a tiny pipeline: one of the peer's raises."""

    def enable(pipe, value, steps):
        if value == 3:
            raise RuntimeError("no such thing\nas three")
        PEERS["DeepCache 0.1.1"].enable(pipe, (value, 0), steps)

    recipes = [Recipe(DeepCache(when=Every(n))) for n in (2, 3)]
    monkeypatch.setattr(head_to_head, "OURS", {"DeepCache": Ours("unet", lambda model, steps: recipes, ("peer",))})
    monkeypatch.setattr(head_to_head, "PEERS", {"peer": Peer("unet", (2, 3), enable)})
    monkeypatch.setattr(head_to_head.embedded, "load", lambda model, torch_dtype: tiny("sd").to(torch_dtype))
    return Race(model="tiny", steps=4, count=4, repeats=3)


def test_a_race_is_resumed_and_a_peer_that_raises_is_a_row(small, tmp_path):
    seen = []

    def progress(missing):
        seen.append([point.key for point in missing])
        yield from missing

    points = HeadToHead(small, tmp_path).run(progress)
    assert len(points) == 5 and len(seen[0]) == 5
    plain, ours, _, theirs, failed = points
    assert plain.psnr == 100 and 0.5 < plain.speed < 2
    assert failed.error.startswith("RuntimeError: no such thing") and math.isnan(failed.psnr)
    assert ours.psnr == pytest.approx(theirs.psnr, abs=0.1)  # the same algorithm
    again = HeadToHead(small, tmp_path).run(progress)
    assert seen[1] == [] and len(again) == 5
    found = write(points, small, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["race"] == found["race"]
    assert (tmp_path / "curves.svg").read_text().count("<polyline") == 2
    assert len((tmp_path / "points.csv").read_text().splitlines()) == 6
