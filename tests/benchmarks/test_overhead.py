"""The bookkeeping stays small beside any model worth accelerating."""

from fewstep.benchmarks.overhead import measure


def test_bookkeeping_is_within_its_budget():
    found = measure(200)
    assert found.module_call_s <= 50e-6
    assert found.pipeline_call_s <= 1e-3
