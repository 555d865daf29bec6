"""A technique: one frozen description that holds its settings and its behaviour."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .policy import Policy

if TYPE_CHECKING:
    from .patches import Patches
    from .target import Target


class Stage(IntEnum):
    """Where a technique stands in a recipe, innermost first: what is applied later wraps what was applied before."""

    WEIGHTS = 0
    CAST = 1
    FUSE = 2
    QUANTIZE = 3
    SOLVER = 4
    KERNEL = 5
    TOKENS = 6
    COMPILE = 7
    CACHE = 8
    GUIDANCE = 9
    PLACEMENT = 10


class Fidelity(Enum):
    """What a technique promises about its output beside the plain pipeline's, same seed."""

    EXACT = "bit-equal"
    ROUNDING = "same dtype, operations reordered: within 1e-4 relative on the final latents"
    PRECISION = "a lower precision: a stated PSNR"
    LOSSY = "another picture of measured quality"


@dataclass(frozen=True)
class Claim:
    """A seam that one technique owns on one set of modules: two techniques of a recipe cannot both own it."""

    seam: str
    modules: str = "denoiser"

    def __str__(self) -> str:
        return f"{self.seam} of the {self.modules}"


@dataclass(frozen=True, kw_only=True)
class Technique(ABC):
    """Base of every technique. Subclasses are frozen dataclasses whose fields are all their settings.

    `apply` changes a pipeline through `patches` alone, so that nothing has to be written for taking it off again.
    What one call remembers lives in `current_run().slot(...)`, never on the technique, a module or a class.
    """

    name: ClassVar[str]
    stage: ClassVar[Stage]
    fidelity: ClassVar[Fidelity]
    claims: ClassVar[frozenset[Claim]] = frozenset()

    def check(self, target: "Target") -> None:  # noqa: B027  (optional: most techniques work everywhere)
        """Raises `Unsupported` where this technique cannot work, saying why and what to use instead."""

    @abstractmethod
    def apply(self, target: "Target", patches: "Patches") -> None:
        """Attaches to `target`."""

    def identity(self) -> Self | None:
        """The setting at which the output equals the plain pipeline's to this technique's class, if there is one."""
        return self

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        """Values that a sweep may try, by field."""
        return {}

    def call_defaults(self) -> Mapping[str, Any]:
        """Arguments of the pipeline's call that this technique sets where the caller does not."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Fields by name, as they go into a recipe's JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v.settings() if isinstance(v, Policy) else v for k, v in values.items()}

    def __str__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        default = {f.name: f.default for f in dataclasses.fields(self)}
        changed = {k: v for k, v in values.items() if default[k] != v}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"
