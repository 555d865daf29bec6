"""When to reuse: one idea for every cache, decided for each row of the batch by itself.

A policy sees what one row has been through in this call and nothing else: no step count given in advance, no other row.
`Every(3) & Window(start=8.0, stop=0.3)` reuses where both would.
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import InvalidRecipe


def need(condition: bool, words: str) -> None:
    if not condition:
        raise InvalidRecipe(words)


@dataclass
class Past:
    """What one row has been through: `evaluation` counts its evaluations by this denoiser, `reused` those in a row that
    were not computed. `sigma` is its noise level now; `change` the relative change of the watched feature since it was
    last computed, nan where none is watched."""

    evaluation: int = 0
    reused: int = 0
    sigma: float = math.nan
    change: float = math.nan


@dataclass(frozen=True)
class Policy(ABC):
    """Whether a row that has something to reuse reuses it. The first evaluation is computed whatever a policy says."""

    kind: ClassVar[str]

    @abstractmethod
    def reuses(self, past: Past) -> bool:
        """Whether this evaluation is reused."""

    @property
    def watches(self) -> bool:
        """Whether `Past.change` is read, so that it has to be measured."""
        return False

    def ties(self, change: float) -> bool:
        """Whether `change` lies so close to a threshold that rounding may decide: in another batch, the other way."""
        return False

    def __and__(self, other: "Policy") -> "Policy":
        return Both(self, other)

    def settings(self) -> dict[str, Any]:
        """As it goes into a recipe's JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"policy": self.kind} | {k: v.settings() if isinstance(v, Policy) else v for k, v in values.items()}


@dataclass(frozen=True)
class Every(Policy):
    """Computes each n-th evaluation and reuses the others; `Every(1)` reuses nothing."""

    n: int
    kind: ClassVar[str] = "every"

    def __post_init__(self) -> None:
        need(isinstance(self.n, int) and self.n >= 1, f"Every({self.n!r}): n must be a whole number from 1 up")

    def reuses(self, past: Past) -> bool:
        return past.reused + 1 < self.n


EACH_THIRD = Every(3)


@dataclass(frozen=True)
class Window(Policy):
    """Reuses only at noise levels from `start` down to `stop`, as `Row.sigma` counts them (flows: 1 to 0)."""

    start: float = math.inf
    stop: float = 0.0
    kind: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        words = f"Window(start={self.start!r}, stop={self.stop!r}): noise falls from start to stop, both from 0 up"
        need(self.start >= self.stop >= 0, words)

    def reuses(self, past: Past) -> bool:
        return self.start >= past.sigma >= self.stop


@dataclass(frozen=True)
class Listed(Policy):
    """Computes the evaluations at `computed` (from 0) and reuses the others: a mask for one number of steps, as
    `fewstep fit steps` finds them."""

    computed: tuple[int, ...]
    kind: ClassVar[str] = "listed"

    def __post_init__(self) -> None:
        object.__setattr__(self, "computed", tuple(self.computed))
        words = f"Listed({self.computed!r}): evaluations are counted from 0, each once, in order"
        need(all(isinstance(i, int) and i >= 0 for i in self.computed), words)
        need(list(self.computed) == sorted(set(self.computed)), words)

    def reuses(self, past: Past) -> bool:
        return past.evaluation not in self.computed


@dataclass(frozen=True)
class Dynamic(Policy):
    """Reuses while the watched feature has changed by less than `threshold` since it was last computed, at most
    `max_consecutive` times in a row."""

    threshold: float
    max_consecutive: int = 3
    kind: ClassVar[str] = "dynamic"

    def __post_init__(self) -> None:
        need(self.threshold >= 0, f"Dynamic({self.threshold!r}): the threshold is a relative change, from 0 up")
        words = f"Dynamic(max_consecutive={self.max_consecutive!r}) must be a whole number from 1 up"
        need(isinstance(self.max_consecutive, int) and self.max_consecutive >= 1, words)

    @property
    def watches(self) -> bool:
        return True

    def ties(self, change: float) -> bool:
        return abs(change - self.threshold) <= 1e-3 * self.threshold

    def reuses(self, past: Past) -> bool:
        return past.change < self.threshold and past.reused < self.max_consecutive


@dataclass(frozen=True)
class Both(Policy):
    """Reuses where two policies do."""

    first: Policy
    second: Policy
    kind: ClassVar[str] = "both"

    @property
    def watches(self) -> bool:
        return self.first.watches or self.second.watches

    def ties(self, change: float) -> bool:
        return self.first.ties(change) or self.second.ties(change)

    def reuses(self, past: Past) -> bool:
        return self.first.reuses(past) and self.second.reuses(past)


KINDS: dict[str, type[Policy]] = {kind.kind: kind for kind in (Every, Window, Listed, Dynamic, Both)}


def policy(settings: Mapping[str, Any]) -> Policy:
    """The policy of `Policy.settings()`. Raises `InvalidRecipe` for an unknown kind or setting, naming the known."""
    values = dict(settings)
    name = values.pop("policy", None)
    if name not in KINDS:
        raise InvalidRecipe(f"unknown policy {name!r}; known: {', '.join(KINDS)}")
    try:
        return KINDS[name](**{k: policy(v) if isinstance(v, Mapping) else v for k, v in values.items()})
    except TypeError:
        known = ", ".join(f.name for f in dataclasses.fields(KINDS[name]))
        raise InvalidRecipe(f"policy {name}: cannot build it from {values}; its settings are: {known}") from None


def parts(policy: Policy) -> Iterator[Policy]:
    """The policy and those that it is made of."""
    yield policy
    if isinstance(policy, Both):
        yield from parts(policy.first)
        yield from parts(policy.second)
