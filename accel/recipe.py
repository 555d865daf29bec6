"""A recipe: techniques in the order in which they are applied, and what a call uses where the caller says nothing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import catalog
from .errors import InvalidRecipe
from .policy import policy
from .technique import Claim, Technique

FORMAT = 1


@dataclass(frozen=True, init=False)
class Recipe:
    """`Recipe(TextCache(), Bfloat16(), num_inference_steps=20)`.

    Sorted by stage whatever the order given. Raises `InvalidRecipe` for two techniques that own the same seam.
    """

    techniques: tuple[Technique, ...]
    defaults: Mapping[str, Any]

    def __init__(self, *techniques: Technique, **call_defaults: Any) -> None:
        for technique in techniques:
            if not isinstance(technique, Technique):
                raise InvalidRecipe(f"{technique!r} is not a technique: give instances, for instance TextCache()")
        ordered = tuple(sorted(techniques, key=lambda t: t.stage))
        refuse_conflicts(ordered)
        defaults: dict[str, Any] = {}
        for technique in ordered:
            defaults |= technique.call_defaults()
        object.__setattr__(self, "techniques", ordered)
        object.__setattr__(self, "defaults", MappingProxyType(defaults | call_defaults))

    def __hash__(self) -> int:
        return hash(self.techniques)

    def __add__(self, other: "Recipe") -> "Recipe":
        return Recipe(*self.techniques, *other.techniques, **{**self.defaults, **other.defaults})

    def __str__(self) -> str:
        parts = [str(t) for t in self.techniques] + [f"{k}={v!r}" for k, v in self.defaults.items()]
        return f"Recipe({', '.join(parts)})"

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        techniques = [{"name": t.name, **t.settings()} for t in self.techniques]
        return {"format": FORMAT, "techniques": techniques, "call_defaults": dict(self.defaults)}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Recipe":
        """Raises `InvalidRecipe` for a newer format, an unknown technique or setting, naming the known ones."""
        if not isinstance(data, Mapping) or "techniques" not in data:
            raise InvalidRecipe("a recipe is a JSON object with the keys format, techniques and call_defaults")
        if data.get("format", FORMAT) > FORMAT:
            raise InvalidRecipe(f"this recipe has format {data['format']}, newer than {FORMAT}: update fewstep")
        return cls(*(build(entry) for entry in data["techniques"]), **data.get("call_defaults", {}))

    @classmethod
    def load(cls, path: str | Path) -> "Recipe":
        try:
            return cls.from_dict(json.loads(Path(path).read_text()))
        except FileNotFoundError:
            raise InvalidRecipe(f"no recipe at {path}") from None
        except json.JSONDecodeError as error:
            raise InvalidRecipe(f"{path} is not valid JSON: {error}") from None


def build(entry: Mapping[str, Any]) -> Technique:
    settings = dict(entry)
    name = settings.pop("name", None)
    kind = catalog.technique(name)
    try:
        return kind(**{key: setting(value) for key, value in settings.items()})
    except TypeError:
        known = ", ".join(kind.__dataclass_fields__) or "none"
        raise InvalidRecipe(f"{name}: cannot build it from {settings}; its settings are: {known}") from None


def setting(value: Any) -> Any:
    """A technique's setting from its form in JSON."""
    if isinstance(value, list):
        return tuple(value)
    return policy(value) if isinstance(value, Mapping) and "policy" in value else value


def refuse_conflicts(techniques: tuple[Technique, ...]) -> None:
    owners: dict[Claim, Technique] = {}
    for technique in techniques:
        for claim in technique.claims:
            if claim in owners:
                raise InvalidRecipe(f"{owners[claim]} and {technique} both own the {claim}: keep one of them")
            owners[claim] = technique
