"""The house: imports go downwards, the packaging lists what is on disk, and every technique has a card."""

import ast
import inspect
import tomllib
from pathlib import Path

import pytest

from fewstep.accel import catalog

ROOT = Path(__file__).parent.parent
LAYERS = {"schedulers": 0, "accel": 1, "distill": 2, "serving": 2, "benchmarks": 3}
CARD = ("What", "Pays when", "Hurts when", "Exact?", "Settings", "Source", "Measured")
SOURCES = [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]


def imported_layers(file):
    """Layers that a file imports, relatively or as fewstep.X; a string in the command table is no import."""
    depth = len(file.relative_to(ROOT).parts) - 1
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fewstep."):
            yield node.module.split(".")[1]


@pytest.mark.parametrize("file", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downwards(file):
    own = LAYERS[file.relative_to(ROOT).parts[0]]
    for layer in set(imported_layers(file)) & set(LAYERS):
        assert LAYERS[layer] <= own, f"{file} imports {layer}, which stands above it"


@pytest.mark.parametrize("file", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_bare_import_of_a_folder(file):
    """`import schedulers` would be the user's own folder."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        assert not {n.split(".")[0] for n in names} & set(LAYERS)


def test_the_listed_packages_are_the_folders_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {p.parent for p in SOURCES if p.name == "__init__.py"} - {ROOT / "accel" / "_umbrella"}
    on_disk = {"fewstep." + ".".join(f.relative_to(ROOT).parts) for f in folders} | {"fewstep"}
    assert set(settings["packages"]) == on_disk
    for folder in {p.parent for p in SOURCES}:
        assert (folder / "__init__.py").exists(), f"{folder} holds modules but is no package"


@pytest.mark.parametrize("name", catalog.TECHNIQUES)
def test_every_technique_has_a_card(name):
    card = inspect.getmodule(catalog.technique(name)).__doc__
    assert not [head for head in CARD if head not in card]
    assert "pending" not in card


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "misc"])
def test_no_file_is_named_for_nothing(name):
    assert not [p for p in SOURCES if p.stem == name]
