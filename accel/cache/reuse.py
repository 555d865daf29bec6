"""What every feature cache does in a call: decide for each row, skip, and put a feature from before in place.

A technique says where the cached span lies (`transformer_span.py`, `unet_span.py`), when its policy reuses, and how
many earlier values it extrapolates from. The decision is made outside of every block; where rows differ in it, the
denoiser is called once for the rows that compute and once for those that reuse: no block ever sees both.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import anatomy
from ..errors import InvalidRecipe, Unsupported
from ..patches import Patches
from ..policy import Both, Past, Policy, Window, parts
from ..rows import RowStore, Values, in_groups, take
from ..run import Row, Run, open_run

WATCHED = 2**14  # values of a row that are compared: of unrelated ones the mean lies within 2 % of that of all


class Mixed(Exception):
    """Rows of one call decided differently after the probe."""


class Reuse:
    """The state of one cache on one denoiser in one call."""

    def __init__(self, cache: "Cache") -> None:
        self.cache = cache
        self.past: dict[Hashable, Past] = {}
        self.watched, self.probed = RowStore(), RowStore()
        self.spans: dict[Any, RowStore] = {}
        self.blanks: dict[Any, Any] = {}
        self.entry: dict[Any, Values] = {}
        self.rows: tuple[Row, ...] = ()
        self.asked = 0  # rows of the call that is being decided
        self.turns: Counter[Any] = Counter()  # how often each span was met in this evaluation
        self.call = 0
        self.size: tuple[int, ...] = ()
        self.reusing: bool | None = None  # None: the probe has yet to decide
        self.changes: list[float] = []

    # ------------------------------------------------------------------------------------ rows and decisions

    def begin(self, run: Run, size: tuple[int, ...]) -> None:
        """A denoiser call on latents of `size`: of another size, nothing that is kept fits."""
        if size != self.size:
            self.spans, self.blanks, self.size = {}, {}, size
            self.watched, self.probed = RowStore(), RowStore()
        self.asked, self.call, self.reusing = len(run.rows), run.call_of_step, None

    @property
    def keys(self) -> list[Hashable]:
        """Who the rows of this group are. Calls of one step are told apart even where their branches are not known."""
        return [(row.request, row.image, row.branch, self.call) for row in self.rows]

    def decide(self, changes: Sequence[float]) -> list[bool]:
        """Whether each row reuses."""
        flags: list[bool] = []
        for row, key, change in zip(self.rows, self.keys, changes, strict=True):
            past = self.past.setdefault(key, Past())
            past.sigma, past.change = row.sigma, change
            flags.append(self.has(key) and self.cache.policy.reuses(past))
        return flags if len(set(flags)) == 1 or self.cache.divisible else [False] * len(flags)

    def has(self, key: Hashable) -> bool:
        return bool(self.spans) and all(store.ages(key) for store in self.spans.values())

    def settle(self, reusing: bool) -> None:
        """This group's decision, counted for each of its rows."""
        self.reusing = reusing
        self.turns.clear()
        open_run().count(self.cache.name, "reused" if reusing else "computed", len(self.rows))
        for key in self.keys:
            past = self.past.setdefault(key, Past())
            past.evaluation += 1
            past.reused = past.reused + 1 if reusing else 0

    def compute_after_all(self) -> None:
        """What was kept does not fit what came: the rows start anew."""
        run, keys = open_run(), self.keys
        run.count(self.cache.name, "reused", -len(keys))
        run.count(self.cache.name, "computed", len(keys))
        self.reusing = False
        for key in keys:
            self.past[key].reused = 0
        for store in self.spans.values():
            store.drop(keys)

    # ------------------------------------------------------------------------------------ the probe

    def probe(self, feature: Tensor) -> list[bool]:
        """Decisions from how much `feature` has changed, for each row, since it was last computed."""
        feature = sampled(feature)
        changes = self.change(feature)
        self.changes += [c for c in changes if not math.isnan(c)]
        if ties := sum(self.cache.policy.ties(c) for c in changes):
            open_run().count(self.cache.name, "ties", ties)
        flags = self.decide(changes)
        computed = [i for i, flag in enumerate(flags) if not flag]
        if computed:
            keys = self.keys
            self.watched.put([keys[i] for i in computed], (some(feature, computed, len(keys)),))
        return flags

    def change(self, feature: Tensor) -> list[float]:
        """Relative mean absolute change of each row; nan where there is nothing to compare with."""
        keys = self.keys
        known = [i for i, key in enumerate(keys) if self.watched.ages(key)]
        changes = [math.nan] * len(keys)
        if known:
            (before,) = self.watched.get([keys[i] for i in known])
            now = some(feature, known, len(keys))
            if before is not None and before.shape == now.shape:
                for i, value in zip(known, relative_change(now, before, len(known)), strict=True):
                    changes[i] = value
        return changes

    # ------------------------------------------------------------------------------------ features

    def keep(self, span: Any, values: Values) -> None:
        """A span was computed."""
        store = self.spans.setdefault(span, RowStore(self.cache.order + 1))
        keys = self.keys
        if any(store.ages(key) and not fits(store.get([key]), values) for key in keys):
            store.drop(keys)
        store.put(keys, values, [angle(row.sigma, self.past[key]) for row, key in zip(self.rows, keys, strict=True)])

    def predict(self, span: Any, base: Values | None = None) -> Values:
        """The span's values now, the newest, or extrapolated through the newest few over the noise level; on `base`."""
        store, keys = self.spans[span], self.keys
        weights = self.weights(store, keys)
        total = base
        for age in range(max(map(len, weights))):
            column = [w[age] if age < len(w) else 0.0 for w in weights]
            total = plus(total, store.get(keys, age), column)
        return total or ()

    def weights(self, store: RowStore, keys: list[Hashable]) -> list[list[float]]:
        """Of each row, those of its kept values, the newest first."""
        if self.cache.order == 0:
            return [[1.0]] * len(keys)
        found: dict[tuple[float, ...], list[float]] = {}  # rows that came together have been through the same levels
        return [self.weights_of(store, row, key, found) for row, key in zip(self.rows, keys, strict=True)]

    def weights_of(self, store: RowStore, row: Row, key: Hashable, found: dict[Any, list[float]]) -> list[float]:
        now, levels = angle(row.sigma, self.past[key]), store.levels(key)
        if (now, *levels) not in found:
            found[now, *levels] = extrapolation(levels, now, self.cache.damping)
        return found[now, *levels]


class Cache:
    """One technique on one denoiser: its policy, and where its spans and its probe were put."""

    def __init__(self, name: str, denoiser: nn.Module, policy: Policy, order: int = 0, damping: float = 0.0) -> None:
        self.name, self.denoiser, self.policy, self.order, self.damping = name, denoiser, policy, order, damping

    @property
    def divisible(self) -> bool:
        """Whether rows may be called apart. PAG's processors, which stand on the denoiser during a call alone, split
        its batch in blocks."""
        processors = getattr(self.denoiser, "attn_processors", {})
        return not any(type(processor).__name__.startswith("PAG") for processor in processors.values())

    def attach(self, patches: Patches) -> None:
        patches.wrap_forward(self.denoiser, self.around)

    def state(self) -> Reuse:
        """Of the call in progress; made by the around of the denoiser, which every block is beneath. Its rows are those
        at hand: a technique in between may have called the denoiser for some of them."""
        run = open_run()
        state = run.slot(self, self.fresh)
        state.rows = run.rows
        return state

    def fresh(self) -> Reuse:
        """What one call is going to remember."""
        return Reuse(self)

    def around(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run, state = open_run(), self.state()
        if self.policy.watches and not state.past:
            run.closing.append(lambda run: self.say(run, state))
        state.begin(run, anatomy.size_of(self.denoiser, args, kwargs))
        if self.policy.watches:
            return self.after_probe(run, state, inner, args, kwargs)
        return self.decided(run, state, state.decide([math.nan] * len(run.rows)), inner, args, kwargs)

    def after_probe(self, run: Run, state: Reuse, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call if all rows decide alike; else the probe's output is kept, and the rows go on in two groups."""
        try:
            return inner(*args, **kwargs)
        except Mixed as mixed:
            return self.decided(run, state, mixed.args[0], inner, args, kwargs)

    def decided(self, run: Run, state: Reuse, flags: list[bool], inner: Any, args: Any, kwargs: Any) -> Any:
        if len(set(flags)) == 1:
            return self.go(run, state, flags[0], inner, *args, **kwargs)
        groups = [
            ([i for i, flag in enumerate(flags) if flag is kind], functools.partial(self.go, run, state, kind, inner))
            for kind in (False, True)
        ]
        return in_groups(run, self.denoiser, groups, args, kwargs)

    def go(self, run: Run, state: Reuse, reusing: bool, inner: Any, *args: Any, **kwargs: Any) -> Any:
        """The denoiser for rows that decided alike."""
        state.rows = run.rows
        state.settle(reusing)
        return inner(*args, **kwargs)

    def probing(self, feature: Callable[[Any, Any, Any], Tensor]) -> Callable[..., Any]:
        """An around for the module whose output decides; `feature(args, kwargs, output)` is what is watched."""

        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = self.state()
            if state.reusing is not None:  # decided in a group: this module has been computed
                return packed(state.probed.get(state.keys), state.blanks["probe"])
            self.need_all_rows(state)
            output = inner(*args, **kwargs)
            flags = state.probe(feature(args, kwargs, output))
            if len(set(flags)) == 1:
                state.settle(flags[0])
                return output
            values, state.blanks["probe"] = unpacked(output)
            state.probed.put(state.keys, values)
            raise Mixed(flags)

        return around

    def need_all_rows(self, state: Reuse) -> None:
        if len(state.rows) != state.asked:
            raise Unsupported(
                f"{self.name} decides inside the denoiser, and a technique beneath it has called that for some of "
                "the rows: name that technique after it in the recipe"
            )

    def say(self, run: Run, state: Reuse) -> None:
        """A threshold that decided nothing is told with what it would have had to lie between."""
        counts = run.report.counts[self.name]
        if state.changes and not (counts["reused"] and counts["computed"] > len(state.past)):
            low, high = min(state.changes), max(state.changes)
            what = "never" if not counts["reused"] else "always"
            run.report.note(
                f"{self.name}: the threshold {what} allowed reuse; the watched feature changed by {low:.3g} to "
                f"{high:.3g} between evaluations: choose a value in between"
            )


# ---------------------------------------------------------------------------------------------------- arithmetic


def some(feature: Tensor, places: Sequence[int], rows: int) -> Tensor:
    return feature if len(places) == rows else take(feature, places, rows)


def sampled(feature: Tensor) -> Tensor:
    """What is watched of a feature (rows, tokens, width) or (rows, channels, ..., height, width): all of a small one,
    of a large one some of the tokens or lines. The stride is odd, so that tokens do not all lie in one column."""
    lines = 1 if feature.ndim == 3 else feature.ndim - 2
    most = -(-feature[0].numel() // WATCHED)
    stride = min(most, feature.shape[lines] // 8)
    return feature if stride <= 1 else feature[(slice(None),) * lines + (slice(None, None, stride | 1),)]


def relative_change(now: Tensor, before: Tensor, rows: int) -> list[float]:
    """Of each row, in float32: mean |now - before| over mean |before|."""
    now, before = now.float().reshape(rows, -1), before.float().reshape(rows, -1)
    change, size = (torch.linalg.vector_norm(x, ord=1, dim=1) for x in (now - before, before))
    return (change / size.clamp_min(1e-12 * now.shape[1])).tolist()


def angle(sigma: float, past: Past) -> float:
    """The noise level as an abscissa that is finite at zero SNR; the count of evaluations where it is not known."""
    return float(past.evaluation) if math.isnan(sigma) else -math.atan(sigma)


def extrapolation(levels: Sequence[float], now: float, damping: float = 0.0) -> list[float]:
    """Weights at `now` of values at `levels`, the newest first; the first two of one level end them.

    Lagrange's, damped: at r times the distance of the newest two levels, 1 / (1 + r `damping`) of the way is gone.
    """
    different: list[float] = []
    for level in levels:
        if any(abs(level - other) < 1e-6 for other in different):
            break
        different.append(level)
    weights = [math.prod((now - o) / (mine - o) for o in different if o != mine) for mine in different]
    if damping == 0 or len(different) == 1:
        return weights
    newest, before = different[:2]
    trend = 1 / (1 + damping * abs((now - newest) / (newest - before)))
    return [trend * weights[0] + 1 - trend, *(trend * weight for weight in weights[1:])]


def plus(total: Values | None, values: Values, factors: Sequence[float]) -> Values:
    """`total` and `values` times a factor a row, in one pass over each tensor: they are as large as the latents."""
    return tuple(_plus(t, v, factors) for t, v in zip(total or (None,) * len(values), values, strict=True))


def _plus(total: Tensor | None, value: Tensor | None, factors: Sequence[float]) -> Tensor | None:
    if value is None:
        return total
    if len(set(factors)) == 1:
        if total is not None:
            return torch.add(total, value, alpha=factors[0])
        return value if factors[0] == 1.0 else value * factors[0]
    column = torch.tensor(factors, dtype=value.dtype, device=value.device)
    column = column.repeat_interleave(len(value) // len(factors)).view(-1, *(1,) * (value.ndim - 1))
    return column * value if total is None else torch.addcmul(total, column, value)


def minus(left: Values, right: Values) -> Values:
    return tuple(a if a is None or b is None else a - b for a, b in zip(left, right, strict=True))


def fits(kept: Values, values: Values) -> bool:
    """Whether both have the same shape but for the rows."""
    both = zip(kept, values, strict=True)
    return all(a is None or b is None or a.shape[1:] == b.shape[1:] for a, b in both)


def unpacked(output: Any) -> tuple[Values, Any]:
    """The tensors of a module's output, and the form to put others like them into."""
    if isinstance(output, (tuple, list)):
        return tuple(output), type(output)
    return (output,), None


def packed(values: Values, form: Any) -> Any:
    return values[0] if form is None else form(values)


def need_rows(denoiser: nn.Module, name: str) -> None:
    """Raises `Unsupported` where fewstep cannot take the rows of this denoiser apart."""
    if anatomy._by_class(type(anatomy._bare(denoiser)), anatomy.ROW_ARGS) is None:
        raise Unsupported(
            f"{name} decides for each row, and the rows of {type(denoiser).__name__} are not known: say which "
            f"arguments have a row per image in fewstep.accel.anatomy.ROW_ARGS"
        )


def need_bounded(policy: Policy, name: str, field: str = "when") -> None:
    """Raises `InvalidRecipe` for no policy, and `Unsupported` for one that might never compute inside its window."""
    if not isinstance(policy, Policy):
        raise InvalidRecipe(f"{name}({field}={policy!r}): give a policy, for instance Every(3)")
    if all(isinstance(part, (Window, Both)) for part in parts(policy)):
        raise Unsupported(
            f"{name}({field}={policy}) never computes inside its window: Every(3) & {policy}, for instance"
        )
