"""Rebuild emoji64.npz: emoji of eight drawing styles on white, with captions, from npm packages.

    python -m fewstep.benchmarks.data.make_emoji --out emoji64.npz

Every icon is joined to a concept of emojibase by its code point where its set lists one, else by its name or aliases.
An icon without a concept keeps its own name as caption and concept -1. One picture a concept and style, no skin tones.
Licences, as stated by each set: CC-BY-4.0 (twemoji, emojione, streamline), Apache-2.0 (noto, noto-v1, fxemoji),
MIT (fluent, emojibase). Weights trained on the pictures are shipped with a NOTICE that names them.
"""

import io
import json
import re
import shutil
import subprocess
import tempfile
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich.progress import track

from ...accel.errors import FewstepError, MissingExtra

LABELS = ("emojibase-data", "17.0.0")
STYLES = {
    "twemoji": "1.2.5",
    "noto": "1.2.9",
    "noto-v1": "1.2.5",
    "fluent-emoji": "1.2.7",
    "fluent-emoji-flat": "1.2.6",
    "emojione": "1.2.3",
    "fxemoji": "1.2.2",
    "streamline-emojis": "1.2.4",
}
SHARE_ALIKE = {"openmoji": "1.2.29", "emojione-v1": "1.2.3"}  # CC-BY-SA-4.0: not for weights under another licence
SHORTCODES = ("emojibase", "joypixels", "iamcal", "github")  # the first that knows a name decides
# Skin tones of people. Three lamps ("police car light") fall with them: taking them back would move the held-out split.
TONE = re.compile(r"-(light|medium|dark)$|skin-tone")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One icon to be drawn: its concept (-1 if none) and its SVG."""

    style: int
    concept: int
    caption: str
    svg: str


def main(
    out: Annotated[Path, typer.Option(help="file to write")] = Path("emoji64.npz"),
    size: Annotated[int, typer.Option(help="pixels a side", min=8)] = 64,
    work: Annotated[Path | None, typer.Option(help="folder for node_modules; default a temporary one")] = None,
    all_licences: Annotated[bool, typer.Option(help="add the share-alike sets, openmoji and emojione-v1")] = False,
) -> None:
    """Download the icon sets with npm and draw them into one npz."""
    styles = STYLES | (SHARE_ALIKE if all_licences else {})
    with tempfile.TemporaryDirectory() as spare:
        try:
            modules = install(work or Path(spare), styles)
            arrays = draw(modules, tuple(styles), size)
        except FewstepError as error:
            raise typer.Exit(_say(error)) from error
    np.savez_compressed(out, **arrays)
    typer.echo(f"{out}: {len(arrays['X'])} pictures, {int((arrays['concept'] >= 0).sum())} with a concept")


def install(folder: Path, styles: dict[str, str]) -> Path:
    """`npm install` the sets into `folder`; returns its node_modules. Raises MissingExtra, FewstepError."""
    npm = shutil.which("npm")
    if npm is None:
        raise MissingExtra("npm is needed to download the icon sets: install Node.js (https://nodejs.org)")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true}')
    wanted = [f"@iconify-json/{name}@{version}" for name, version in styles.items()] + ["@".join(LABELS)]
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", *wanted]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FewstepError(f"npm install failed in {folder}:\n{done.stderr.strip()[-2000:]}")
    return folder / "node_modules"


def draw(modules: Path, styles: tuple[str, ...], size: int) -> dict[str, Any]:
    """All arrays of the npz: X (N, size, size, 3) uint8 on white, style, concept, caption, and the concepts' texts."""
    concepts = Concepts(modules / LABELS[0])
    pictures = [p for index, name in enumerate(styles) for p in choose(modules, name, index, concepts)]
    return {
        "X": np.stack([rasterise(p.svg, size) for p in track(pictures, "drawing")]),
        "style": np.array([p.style for p in pictures], np.uint8),
        "concept": np.array([p.concept for p in pictures], np.int16),
        "caption": np.array([p.caption for p in pictures]),
        "styles": np.array(styles),
        **concepts.arrays,
    }


class Concepts:
    """emojibase's records, found by code point, label, shortcode or country."""

    def __init__(self, folder: Path) -> None:
        records = [r for r in _read(folder / "en/data.json") if r.get("group") is not None]
        message = _read(folder / "en/messages.json")
        text = {kind: {m["order"]: m["message"] for m in message[kind]} for kind in ("groups", "subgroups")}
        self.by_code = {_code(r["hexcode"]): i for i, r in enumerate(records)}
        self._by_name: dict[str, int] = {}
        for name, index in _names(folder, records):
            self._by_name.setdefault(slug(name), index)
        self.labels = [r["label"] for r in records]
        self.arrays = {
            "labels": np.array(self.labels),
            "tags": np.array(["|".join(r.get("tags", ())) for r in records]),
            "group": np.array([text["groups"][r["group"]] for r in records]),
            "subgroup": np.array([text["subgroups"][r["subgroup"]] for r in records]),
        }

    def named(self, names: list[str]) -> int | None:
        """The concept of the first name that is known."""
        return next((self._by_name[name] for name in names if name in self._by_name), None)


def choose(modules: Path, name: str, style: int, concepts: Concepts) -> Iterator[Picture]:
    """The pictures of one set: those with a concept, in order of name, then those with only a name of their own."""
    folder = modules / "@iconify-json" / name
    sheet, aliases, codes = _read(folder / "icons.json"), _aliases(folder), _codes(folder, concepts)
    icons, joined, own = sheet["icons"], dict[int, str](), list[str]()
    for icon in sorted(i for i in icons if not TONE.search(i)):
        concept, hidden = codes.get(icon, concepts.named([icon, *aliases.get(icon, ())])), "hidden" in icons[icon]
        if concept is None:
            own += [] if hidden else [icon]
        elif concept not in joined or ("hidden" in icons[joined[concept]] and not hidden):
            joined[concept] = icon  # hidden icons are old duplicates, sometimes the only ones that join
    for concept, icon in joined.items():
        yield Picture(style=style, concept=concept, caption=concepts.labels[concept], svg=svg(sheet, icon))
    for icon in own:
        yield Picture(style=style, concept=-1, caption=icon.replace("-", " "), svg=svg(sheet, icon))


def slug(name: str) -> str:
    """`flag: São Tomé & Príncipe` -> `flag-sao-tome-and-principe`."""
    plain = unicodedata.normalize("NFKD", name.lower()).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", plain.replace("&", " and ").replace(".", "")).strip("-")


def svg(sheet: dict[str, Any], icon: str) -> str:
    """Iconify stores bodies: give one its frame back."""
    left, top, width, height = (
        sheet["icons"][icon].get(key, sheet.get(key, default))
        for key, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
    )
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {names} viewBox="{left} {top} {width} {height}">{sheet["icons"][icon]["body"]}</svg>'


def rasterise(source: str, size: int) -> np.ndarray:
    """(size, size, 3) uint8, centred on white. Raises MissingExtra without resvg-py."""
    try:
        import resvg_py
    except ImportError as error:
        raise MissingExtra("drawing SVG needs resvg-py: pip install resvg-py") from error
    picture = Image.open(io.BytesIO(resvg_py.svg_to_bytes(svg_string=source, width=size, height=size))).convert("RGBA")
    ground = Image.new("RGBA", (size, size), "white")
    ground.alpha_composite(picture, ((size - picture.width) // 2, (size - picture.height) // 2))
    return np.asarray(ground.convert("RGB"))


def _names(folder: Path, records: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    yield from ((r["label"], i) for i, r in enumerate(records))
    for source in SHORTCODES:
        known = _read(folder / f"en/shortcodes/{source}.json")
        for i, record in enumerate(records):
            codes = known.get(record["hexcode"], [])
            yield from ((code, i) for code in ([codes] if isinstance(codes, str) else codes))
    for i, record in enumerate(records):
        kind, _, country = record["label"].partition(": ")
        if kind == "flag":
            yield from ((f"{before}{country}", i) for before in ("flag-for-flag-", "flag-for-", ""))


def _codes(folder: Path, concepts: Concepts) -> dict[str, int]:
    known = ((icon, concepts.by_code.get(_code(code))) for code, icon in reversed(_read(folder / "chars.json").items()))
    return {icon: concept for icon, concept in known if concept is not None}


def _aliases(folder: Path) -> dict[str, list[str]]:
    aliases: dict[str, list[str]] = {}
    for alias, target in _read(folder / "icons.json").get("aliases", {}).items():
        aliases.setdefault(target["parent"], []).append(alias)
    return aliases


def _code(hexcode: str) -> str:
    return hexcode.lower().replace("-fe0f", "")


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _say(error: Exception) -> int:
    typer.echo(str(error), err=True)
    return 1


if __name__ == "__main__":
    typer.run(main)
