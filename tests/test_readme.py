"""Every Python block of the README runs, in the order in which a reader meets them."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_there_are_blocks():
    assert BLOCKS


@pytest.mark.parametrize("place", range(len(BLOCKS)))
def test_readme_block_runs(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[place], f"README block {place}", "exec"), {"__name__": "readme"})
