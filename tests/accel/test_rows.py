"""Rows apart and together again: the same values, whoever stood beside them."""

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput

from fewstep.accel.rows import RowStore, merge


def rows(*values, per_row=1):
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(per_row)[:, None]


@pytest.mark.parametrize("per_row", [1, 3])
def test_a_row_gets_its_own_value_back_in_any_company(per_row):
    store = RowStore()
    store.put("ab", (rows(1, 2, per_row=per_row), None))
    store.put("c", (rows(3, per_row=per_row), None))
    for keys, values in (("ab", (1, 2)), ("ba", (2, 1)), ("b", (2,)), ("cab", (3, 1, 2)), ("bb", (2, 2))):
        found, nothing = store.get(keys)
        assert torch.equal(found, rows(*values, per_row=per_row)) and nothing is None


def test_the_same_rows_together_are_not_copied():
    store, value = RowStore(), rows(1, 2)
    store.put("ab", (value,))
    assert store.get("ab")[0] is value


def test_only_the_newest_are_kept_and_the_oldest_stands_in():
    store = RowStore(depth=2)
    for level, value in ((3.0, 1), (2.0, 2), (1.0, 3)):
        store.put("a", (rows(value),), [level])
    store.put("b", (rows(9),), [1.0])
    assert [store.get("ab", age)[0].flatten().tolist() for age in (0, 1)] == [[3, 9], [2, 9]]
    assert store.ages("a") == 2 and store.levels("a")[1] == 2.0


@pytest.mark.parametrize("groups", [[[0, 2], [1]], [[1], [0, 2]], [[2, 1, 0]]])
def test_outputs_of_groups_come_back_in_the_order_of_the_rows(groups):
    whole = torch.arange(12.0).view(3, 4)
    taken = [whole[g] for g in groups]
    assert torch.equal(merge(taken, groups), whole)
    assert torch.equal(merge([(t,) for t in taken], groups)[0], whole)
    assert torch.equal(merge([Transformer2DModelOutput(sample=t) for t in taken], groups).sample, whole)
    assert [t.tolist() for t in merge([list(t) for t in taken], groups)] == whole.tolist()
