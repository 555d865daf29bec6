"""Typed configuration files: TOML sections read into frozen dataclasses, with command-line overrides.

`read(path, ["train.steps=100"], train=TrainConfig, model=AutoencoderConfig)` gives one dataclass a section.
"""

import dataclasses
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..accel.errors import InvalidConfig


class Families(dict[str, type]):
    """A section whose kind depends on its key `family`: one dataclass a name."""

    def choose(self, section: str, values: dict[str, Any]) -> type:
        family = str(values.get("family"))
        if family not in self:
            raise InvalidConfig(f"{section}.family must be one of {', '.join(self)}; got {family}")
        return self[family]


def read(path: str | Path, overrides: Iterable[str] = (), **sections: type | Families) -> dict[str, Any]:
    """The sections of a TOML file as dataclasses; `overrides` are `section.key=value` with a TOML value.

    Raises `InvalidConfig` for an unknown section or key, naming the known ones, and for a value of the wrong kind.
    """
    try:
        table = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise InvalidConfig(f"no configuration file at {path}") from None
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not valid TOML: {error}") from None
    for override in overrides:
        section, key, value = parse_override(override)
        table.setdefault(section, {})[key] = value
    check_names("section", table, sections)
    return {name: build(name, kind, table.get(name, {})) for name, kind in sections.items()}


def parse_override(text: str) -> tuple[str, str, Any]:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not equals or not dot:
        raise InvalidConfig(f"override {text!r} must read section.key=value, for instance train.steps=1000")
    try:
        return section, key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return section, key, value.strip()  # a bare word is a string


def build(section: str, kind: type | Families, values: dict[str, Any]) -> Any:
    if isinstance(kind, Families):
        kind = kind.choose(section, values)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    check_names(f"key of [{section}]", values, fields)
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise InvalidConfig(f"[{section}] lacks {', '.join(missing)}")
    return kind(**{name: coerce(f"{section}.{name}", fields[name].type, value) for name, value in values.items()})


def coerce(name: str, kind: Any, value: Any) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(value, list):
        value = tuple(value)
    wanted = getattr(kind, "__origin__", kind)
    if isinstance(wanted, type) and type(value) is not wanted:
        raise InvalidConfig(f"{name} must be of type {wanted.__name__}; got {value!r}")
    return value


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise InvalidConfig(f"unknown {what}: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
