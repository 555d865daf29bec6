"""Rows of the denoiser's batch, apart and together again.

What a technique remembers it remembers for each row, so that a row meets its own past whatever stands beside it; and a
call of which some rows need work and others do not becomes one call for each kind.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from . import anatomy
from .run import Run

Values = tuple[Tensor | None, ...]  # rows, or rows times something, in dimension 0


@dataclass(frozen=True)
class Batch:
    """Values of `rows` rows that were computed together at noise `levels`."""

    values: Values
    rows: int
    levels: tuple[float, ...]

    def take(self, places: Sequence[int]) -> Values:
        if list(places) == list(range(self.rows)):
            return self.values
        return tuple(None if v is None else take(v, places, self.rows) for v in self.values)


class RowStore:
    """The newest `depth` values of each row, kept in the batches they were computed in: while the same rows come
    together, which is nearly always, nothing is copied."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth
        self.kept: dict[Hashable, deque[tuple[Batch, int]]] = {}

    def put(self, keys: Sequence[Hashable], values: Values, levels: Sequence[float] = ()) -> None:
        batch = Batch(values, len(keys), tuple(levels))
        for place, key in enumerate(keys):
            self.kept.setdefault(key, deque(maxlen=self.depth)).appendleft((batch, place))

    def ages(self, key: Hashable) -> int:
        """How many values of this row are kept."""
        return len(self.kept.get(key, ()))

    def levels(self, key: Hashable) -> tuple[float, ...]:
        """Noise levels of the values of this row, the newest first."""
        return tuple(batch.levels[place] for batch, place in self.kept[key])

    def get(self, keys: Sequence[Hashable], age: int = 0) -> Values:
        """The values of these rows together, `age` 0 the newest; a row that has fewer gives its oldest."""
        found = [self.kept[key][min(age, self.ages(key) - 1)] for key in keys]
        batch = found[0][0]
        if all(other is batch for other, _ in found):
            return batch.take([place for _, place in found])
        alone = [batch.take([place]) for batch, place in found]
        return tuple(None if column[0] is None else torch.cat(column) for column in zip(*alone, strict=True))

    def drop(self, keys: Sequence[Hashable]) -> None:
        for key in keys:
            self.kept.pop(key, None)


def take(value: Tensor, places: Sequence[int], rows: int) -> Tensor:
    """Rows of a tensor that holds `rows` of them in dimension 0, each `len(value) / rows` entries."""
    index = torch.tensor(places, device=value.device)
    if len(value) == rows:
        return value.index_select(0, index)
    return value.unflatten(0, (rows, -1)).index_select(0, index).flatten(0, 1)


def in_groups(
    run: Run,
    module: nn.Module,
    groups: Sequence[tuple[Sequence[int], Callable[..., Any]]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A denoiser's call, made once for the rows of each group by the group's own callable, as if it had been one."""
    outputs: list[Any] = []
    for places, call in groups:
        some, named = anatomy.take_rows(module, args, kwargs, torch.tensor(places))
        with run.narrowed(places):
            outputs.append(call(*some, **named))
    return merge(outputs, [places for places, _ in groups])


def merge(outputs: Sequence[Any], groups: Sequence[Sequence[int]]) -> Any:
    """Outputs of groups of rows in the order of the rows: tensors, one entry a row, and whatever holds those."""
    first = outputs[0]
    if isinstance(first, Tensor):
        parts = [o.unflatten(0, (len(g), -1)) for o, g in zip(outputs, groups, strict=True)]
        return torch.cat(parts).index_select(0, order(groups).to(first.device)).flatten(0, 1)
    if isinstance(first, BaseOutput):
        return type(first)(**{name: merge([o[name] for o in outputs], groups) for name in first})
    if isinstance(first, tuple):
        return tuple(merge(column, groups) for column in zip(*outputs, strict=True))
    if isinstance(first, list):
        joined = [entry for output in outputs for entry in output]
        return [joined[i] for i in order(groups).tolist()]
    return first


def order(groups: Sequence[Sequence[int]]) -> Tensor:
    """Where each row is found when the groups are laid end to end."""
    return torch.tensor([place for group in groups for place in group]).argsort()
