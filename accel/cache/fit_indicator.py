"""`fewstep fit indicator`: what a change of a model's modulated input says about a change of what its blocks add.

TeaCache (Liu et al. 2024, arXiv:2411.19108, section 3.4) rescales the first by a polynomial that is fitted to the
second. Here it is fitted on the user's own model, pipeline and number of steps: each row of each evaluation gives one
pair of changes since the evaluation before. What the blocks add is all that a reuse would put in place of a
computation: every stream of every list of blocks, of a UNet the feature of its deep part.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..calls import calls
from ..errors import InvalidConfig
from ..patches import Patches
from ..pipeline import AcceleratedPipeline
from ..recipe import Recipe
from ..rows import RowStore
from ..target import Target
from .modulated import Accumulated, ModulatedCache, TeaCache
from .reuse import relative_change

FORMAT = 1
Pair = tuple[float, float]  # relative changes: of the modulated input, of what the blocks added


def described(pipe: Any, pairs: Sequence[Pair], degree: int) -> dict[str, Any]:
    """What `TeaCache.from_file` reads."""
    return {"format": FORMAT, "model": type(Target.of_pipeline(pipe).denoiser).__name__} | fitted(pairs, degree)


def told(found: dict[str, Any], out: Path) -> str:
    low, high = found["range"]
    return (
        f"{found['model']}: {found['pairs']} pairs, changes of the input from {low:.3g} to {high:.3g}, "
        f"R2 {found['r2']:.3f} (1: the input tells all, 0: nothing)\n"
        f"{out}: use it as TeaCache.from_file({str(out)!r}, threshold=0.15)"
    )


# ---------------------------------------------------------------------------------------------------- measuring


def pairs_of(pipe: Any, prompts: Sequence[str], steps: int, seed: int = 0, quiet: bool = True) -> list[Pair]:
    """What the plain pipeline's evaluations say; it is as before afterwards. Raises `InvalidConfig` for one that takes
    no prompt, `Unsupported` where TeaCache is."""
    asked = list(calls(pipe, prompts, seed, num_inference_steps=steps))
    pipe.set_progress_bar_config(disable=True)
    technique = Recorder()
    fast = AcceleratedPipeline(pipe, Recipe(technique))
    try:
        for call in shown(asked, quiet):
            fast.run(**call)
    finally:
        fast.detach()
    return technique.pairs


def shown(calls: Sequence[Any], quiet: bool) -> Any:
    from rich.console import Console
    from rich.progress import track

    return calls if quiet else track(calls, "plain runs", console=Console(stderr=True))


@dataclass(frozen=True, kw_only=True)
class Recorder(TeaCache):
    """A TeaCache that never reuses, and writes down what it sees."""

    threshold: float = 0.0
    pairs: list[Pair] = field(default_factory=list[Pair], compare=False)

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            cache = RecordingCache(self.name, denoiser, self.policy)
            cache.pairs = self.pairs
            self.put_on(cache, patches)


class RecordingCache(ModulatedCache):
    pairs: list[Pair]

    def fresh(self) -> "Recorded":
        return Recorded(self)

    def around(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().around(inner, *args, **kwargs)
        state = self.state()
        assert isinstance(state, Recorded)
        self.pairs += state.finish()
        return output

    def say(self, run: Any, state: Any) -> None:
        """Nothing: that it never reuses is what it is for."""


class Recorded(Accumulated):
    """Keeps the changes of both of the evaluation in progress."""

    def __init__(self, cache: ModulatedCache) -> None:
        super().__init__(cache)
        self.added_before = RowStore()
        self.inputs: list[float] = []

    def change(self, feature: torch.Tensor) -> list[float]:
        self.inputs = super().change(feature)
        return self.inputs

    def finish(self) -> list[Pair]:
        """Pairs of the rows that were evaluated before."""
        now = self.added_now()
        known = all(self.added_before.ages(key) for key in self.keys)
        (before,) = self.added_before.get(self.keys) if known else (None,)
        self.added_before.put(self.keys, (now,))
        if before is None or before.shape != now.shape:
            return []
        outputs = relative_change(now, before, len(self.rows))
        return [pair for pair in zip(self.inputs, outputs, strict=True) if all(map(math.isfinite, pair))]

    def added_now(self) -> torch.Tensor:
        """All that the blocks of the evaluation added, one row each."""
        kept = [value for store in self.spans.values() for value in store.get(self.keys) if value is not None]
        return torch.cat([value.float().reshape(len(self.rows), -1) for value in kept], dim=1)


# ---------------------------------------------------------------------------------------------------- fitting


def fitted(pairs: Sequence[Pair], degree: int) -> dict[str, Any]:
    """The least-squares polynomial of the second over the first, highest power first, and how much it explains."""
    if len(pairs) < 2 * (degree + 1):
        raise InvalidConfig(
            f"{len(pairs)} pairs are too few for a polynomial of degree {degree}, which wants {2 * (degree + 1)}: give "
            "more steps or prompts, or a lower degree"
        )
    x, y = np.asarray(pairs).T
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", np.exceptions.RankWarning)
        coefficients = np.polyfit(x, y, degree)
    if caught or np.ptp(x) == 0:
        raise InvalidConfig(
            f"the measured changes lie too close together for a polynomial of degree {degree}: give a lower degree, or "
            "prompts and steps that differ more"
        )
    left, all_of_it = np.square(y - np.polyval(coefficients, x)).sum(), np.square(y - y.mean()).sum()
    return {
        "pairs": len(pairs),
        "coefficients": coefficients.tolist(),
        "r2": float(1 - left / all_of_it) if all_of_it else 1.0,
        "range": [float(x.min()), float(x.max())],
    }
