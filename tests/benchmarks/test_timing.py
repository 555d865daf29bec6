"""Pairs, their order, and the interval of their ratio."""

import time

import pytest

from fewstep.benchmarks import timing
from fewstep.benchmarks.timing import Latency, compare, interval, machine


def test_known_ratio_is_inside_its_interval():
    found = compare(lambda: time.sleep(0.012), lambda: time.sleep(0.004), repeats=15)
    assert found.low <= found.ratio <= found.high
    assert found.low == pytest.approx(3, rel=0.25) and found.high == pytest.approx(3, rel=0.25)
    assert found.a.p50_s == pytest.approx(0.012, rel=0.25)


def test_same_call_is_as_fast_as_itself(monkeypatch):
    """By a clock of its own, whose drift is what the pairing must cancel: each reading takes longer than the last."""
    reading = iter(1.01**k for k in range(1000))
    monkeypatch.setattr(timing, "seconds", lambda call: next(reading))
    found = compare(list, list, repeats=20)
    assert found.low <= 1 <= found.high
    assert found.high - found.low < 0.03


def test_order_alternates_after_the_warm_up():
    order: list[str] = []
    found = compare(lambda: order.append("a"), lambda: order.append("b"), repeats=4, warm_up=1)
    assert "".join(order) == "ab" + "abbaabba"
    assert len(found.a.seconds) == len(found.b.seconds) == 4


def test_quantiles():
    latency = Latency(tuple(float(k) for k in range(11)))
    assert (latency.p50_s, latency.p90_s) == (5, 9)


def test_interval_narrows_with_repeats_and_ignores_one_outlier():
    ratios = [1.9, 2.0, 2.1] * 10
    low, high = interval(ratios)
    assert low <= 2 <= high
    wide = interval(ratios[:6])
    assert high - low <= wide[1] - wide[0]
    assert interval([*ratios, 50.0])[1] < 2.2


def test_machine_says_what_a_figure_must_carry(monkeypatch):
    found = machine()
    assert {"date", "processor", "cores", "threads", "device", "torch", "commit"} <= set(found)
    assert found["processor"] and found["torch"]


def test_commit_is_none_without_git(monkeypatch):
    monkeypatch.setattr(timing.shutil, "which", lambda name: None)
    assert timing.commit() is None
