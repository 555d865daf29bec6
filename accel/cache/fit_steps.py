"""`fewstep fit steps`: at which evaluations a cache should compute, searched on the user's own model.

Of all masks with so many computed evaluations, the one whose final latents come nearest to those of the same recipe
that reuses nothing. The search begins with the best of a few smooth spacings, denser towards one end or the other, and
moves one computed evaluation at a time, by one or two places, until no move helps: a local optimum of what is asked
for itself, no model of how errors add up in between. cache-dit calls such masks step computation masks, and has some
ready made for a few models.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import typer
from torch import Tensor

from .. import catalog
from ..calls import calls
from ..errors import InvalidConfig, InvalidRecipe
from ..pipeline import AcceleratedPipeline, known
from ..policy import Listed, Past, Policy
from ..recipe import Recipe
from ..technique import Technique

Mask = tuple[int, ...]  # evaluations that are computed, counted from 0, which is always one of them
REACH = 2  # places that one move goes at most
POWERS = (1.0, 0.6, 0.8, 1.25, 1.6)  # of the spacings that the search begins with


# ---------------------------------------------------------------------------------------------------- recipes


def settable(recipe: str) -> Recipe:
    """The recipe of a file, or of one technique by its name. Raises `InvalidRecipe` for one without a mask to set."""
    name = recipe.replace("-", "_")
    found = Recipe(catalog.example(name)) if name in catalog.TECHNIQUES else known(recipe)
    if not isinstance(found, Recipe) or not any(map(has_mask, found.techniques)):
        raise InvalidRecipe(
            f"{recipe}: no technique of it has a policy `when`: give forecast, deep_cache, or a recipe.json with one"
        )
    return found


def has_mask(technique: Technique) -> bool:
    return isinstance(getattr(technique, "when", None), Policy)


def masked(recipe: Recipe, when: Policy) -> Recipe:
    """The recipe, computing when that policy says so."""
    techniques = [dataclasses.replace(t, when=when) if has_mask(t) else t for t in recipe.techniques]
    return Recipe(*techniques, **recipe.defaults)


def mask_of(recipe: Recipe) -> Mask | None:
    policies = (getattr(technique, "when", None) for technique in recipe.techniques)
    return next((policy.computed for policy in policies if isinstance(policy, Listed)), None)


# ---------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Counting(Policy):
    """Reuses nothing, and counts the evaluations of a call."""

    kind: ClassVar[str] = "counting"
    seen: set[int] = field(default_factory=set[int], compare=False)

    def reuses(self, past: Past) -> bool:
        self.seen.add(past.evaluation)
        return False


class Trials:
    """Latents of the same prompts and seeds with one mask after the other. Its pipeline stays as it is.

    Raises `InvalidConfig` for a pipeline that takes no prompt, `Unsupported` where the recipe's techniques do.
    """

    def __init__(self, pipe: Any, recipe: Recipe, prompts: Sequence[str], seed: int = 0, **options: Any) -> None:
        self.pipe, self.recipe, self.prompts, self.seed, self.options = pipe, recipe, prompts, seed, options
        pipe.set_progress_bar_config(disable=True)
        counting = Counting()
        self.reference = self.latents(counting)
        self.total = max(counting.seen, default=0) + 1

    def with_mask(self, mask: Mask) -> Recipe:
        """The recipe that is written: with the number of steps that its mask was made for."""
        steps = self.options["num_inference_steps"]
        return masked(self.recipe, Listed(mask)) + Recipe(num_inference_steps=steps)

    def latents(self, when: Policy) -> list[Tensor]:
        fast = AcceleratedPipeline(self.pipe, masked(self.recipe, when))
        try:
            asked = calls(self.pipe, self.prompts, self.seed, **self.options)
            return [torch.as_tensor(fast.run(**call).output[0]).double() for call in asked]
        finally:
            fast.detach()

    def distance(self, mask: Mask) -> float:
        """Decibels by which the difference to the reference lies above the reference's own spread; the prompts' mean.
        Below -100, equal."""
        pairs = zip(self.latents(Listed(mask)), self.reference, strict=True)
        return sum(decibels(found, wanted) for found, wanted in pairs) / len(self.prompts)


def decibels(found: Tensor, wanted: Tensor) -> float:
    error = float((found - wanted).square().mean() / wanted.var())
    return 10 * math.log10(max(error, 1e-12)) if math.isfinite(error) else math.inf


# ---------------------------------------------------------------------------------------------------- searching


def search(
    distance: Callable[[Mask], float], total: int, computed: int, start: Mask | None = None
) -> Iterator[tuple[Mask, float]]:
    """Masks with `computed` of `total` evaluations, each nearer than the one before; the first is the best start."""
    known = functools.cache(distance)
    best = min([start] if start else starts(total, computed), key=known)
    yield best, known(best)
    still = 0
    for place in itertools.cycle(range(1, computed)):
        nearest = min(moves(best, place, total), key=known)
        still = 0 if known(nearest) < known(best) else still + 1
        if still == 0:
            best = nearest
            yield best, known(best)
        if still == computed - 1:
            return


def starts(total: int, computed: int) -> list[Mask]:
    """Spacings from 0 to the last evaluation, or as far before the end as they are apart: the even ones first."""
    ends = (total - -(-total // computed), total - 1)
    found = [spaced(end, computed, power) for power in POWERS for end in ends]
    even = tuple(i * total // computed for i in range(computed))
    return list(dict.fromkeys([even, *(mask for mask in found if len(mask) == computed)]))


def spaced(end: int, computed: int, power: float) -> Mask:
    """Some may fall together."""
    return tuple(sorted({round(end * (i / max(computed - 1, 1)) ** power) for i in range(computed)}))


def moves(mask: Mask, place: int, total: int) -> list[Mask]:
    """The mask, and those in which the evaluation at `place` lies elsewhere between its neighbours."""
    after = mask[place + 1] if place + 1 < len(mask) else total
    low, high = max(mask[place - 1] + 1, mask[place] - REACH), min(after - 1, mask[place] + REACH)
    others = [value for value in range(low, high + 1) if value != mask[place]]
    return [mask, *((*mask[:place], value, *mask[place + 1 :]) for value in others)]


def searched(trials: Trials, computed: int, out: Path, quiet: bool = True) -> dict[str, Any]:
    """Searches, and writes the recipe to `out` at each improvement: what was stopped goes on from there.

    Raises `InvalidConfig` for more computed evaluations than there are.
    """
    if computed > trials.total:
        raise InvalidConfig(f"--computed {computed}: these calls have {trials.total} evaluations: give at most as many")
    mask, level = starts(trials.total, computed)[0], math.inf
    even = trials.distance(mask)
    for mask, level in search(trials.distance, trials.total, computed, going_on(trials, computed)):
        trials.with_mask(mask).save(out)
        if not quiet:
            typer.echo(f"{level:7.1f} dB  {mask}", err=True)
    return {"computed": mask, "evaluations": trials.total, "db": level, "even_db": even}


def going_on(trials: Trials, computed: int) -> Mask | None:
    """The recipe's own mask, if it is one of those that are searched."""
    mask = mask_of(trials.recipe)
    if mask is None or len(mask) != computed or mask[0] != 0 or mask[-1] >= trials.total:
        return None
    return mask


def told(found: dict[str, Any], out: Path) -> str:
    return (
        f"{len(found['computed'])} of {found['evaluations']} evaluations computed: {found['computed']}\n"
        f"difference to the plain latents {found['db']:.1f} dB, evenly spaced {found['even_db']:.1f} dB (lower is "
        f"nearer)\n{out}: use it as recipe={str(out)!r}"
    )
