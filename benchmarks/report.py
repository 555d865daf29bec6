"""A sweep's rows as CSV, JSON and one HTML file that needs nothing beside it."""

import base64
import csv
import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image, ImageDraw
from torch import Tensor

Row = dict[str, Any]
QUALITY, COST = "psnr", "latency_s_p50"
HIDDEN = ("key", "recipe", "scheduler", "resolved", "pictures")  # of the page's table, where the key says it


def pareto(rows: Sequence[Row], cost: str = COST, quality: str = QUALITY) -> list[Row]:
    """Rows that no other row is as good as in both and better in one, cheapest first; of equal rows the first.

    Rows that lack a figure are left out.
    """
    complete = [r for r in rows if r.get(cost) is not None and r.get(quality) is not None]
    front: list[Row] = []
    for row in sorted(complete, key=lambda r: (r[cost], -r[quality])):
        if not front or row[quality] > front[-1][quality]:
            front.append(row)
    return front


def grid(images: Sequence[Tensor], labels: Sequence[str], margin: int = 170) -> Image.Image:
    """Rows of pictures, each (N, 3, H, W) in 0..1, with its label at the left."""
    height, width, count = images[0].shape[-2], images[0].shape[-1], max(len(row) for row in images)
    sheet = Image.new("RGB", (margin + count * width, len(images) * height), "white")
    draw = ImageDraw.Draw(sheet)
    for line, (row, label) in enumerate(zip(images, labels, strict=True)):
        draw.multiline_text((4, line * height + 4), label, fill="black")
        for place, image in enumerate(row):
            pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
            sheet.paste(Image.fromarray(pixels), (margin + place * width, line * height))
    return sheet


def write(rows: Sequence[Row], out: Path) -> None:
    """`out`/rows.csv, rows.json and report.html, with the pictures that rows name in it."""
    out.mkdir(parents=True, exist_ok=True)
    flat = [{k: v for k, v in row.items() if not isinstance(v, dict)} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    with (out / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, names)
        table.writeheader()
        table.writerows(flat)
    (out / "rows.json").write_text(json.dumps(list(rows), indent=1) + "\n")
    (out / "report.html").write_text(page(rows, names, out), encoding="utf-8")


def page(rows: Sequence[Row], names: Sequence[str], out: Path) -> str:
    front = {row["key"] for row in pareto(rows)}
    shown = [n for n in names if not n.endswith("_floor") and n not in HIDDEN]
    machine = rows[0].get("machine", {}) if rows else {}
    return PAGE.substitute(
        machine=html.escape(", ".join(f"{k} {v}" for k, v in machine.items())),
        floors=html.escape(", ".join(f"{k[:-6]} {v:.4g}" for k, v in floors(rows).items())),
        scatter=scatter(rows, front),
        head="".join(f"<th>{html.escape(n)}</th>" for n in ("setting", *shown)),
        body="\n".join(table_row(row, shown, row["key"] in front) for row in rows),
        pictures="\n".join(embedded(out / r["pictures"], r["key"]) for r in rows if "pictures" in r),
    )


def floors(rows: Sequence[Row]) -> Row:
    return next(({k: v for k, v in r.items() if k.endswith("_floor")} for r in rows if "psnr_floor" in r), {})


def table_row(row: Row, names: Sequence[str], best: bool) -> str:
    cells = [f"{v:.4g}" if isinstance(v := row.get(n, ""), float) else html.escape(str(v)) for n in names]
    kind = ' class="front"' if best else ""
    return f"<tr{kind}><td>{html.escape(row['key'])}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>"


def embedded(picture: Path, key: str) -> str:
    data = base64.b64encode(picture.read_bytes()).decode()
    return f'<img alt="{html.escape(key)}" src="data:image/png;base64,{data}"><br>'


WIDTH, HEIGHT, PAD = 720, 420, 50


def scatter(rows: Sequence[Row], front: set[str]) -> str:
    """Quality over latency; the front's points are filled and joined."""
    points = [r for r in rows if r.get(COST) is not None and r.get(QUALITY) is not None]
    if not points:
        return "<p>No row has both a latency and a quality.</p>"
    x, y = scale([r[COST] for r in points], PAD, WIDTH - PAD), scale([r[QUALITY] for r in points], HEIGHT - PAD, PAD)
    dots = "".join(dot(x(r[COST]), y(r[QUALITY]), r, r["key"] in front) for r in points)
    line = " ".join(f"{x(r[COST]):.1f},{y(r[QUALITY]):.1f}" for r in pareto(points))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><polyline points="{line}"/>{dots}'
        f'<text x="{WIDTH // 2}" y="{HEIGHT - 8}">seconds a picture (p50)</text>'
        f'<text x="8" y="20">PSNR to the reference setting, dB</text>'
        f"{ticks([r[COST] for r in points], x, HEIGHT - PAD + 16, across=True)}"
        f"{ticks([r[QUALITY] for r in points], y, PAD - 44, across=False)}</svg>"
    )


def scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = min(values), max(values)
    return lambda v: start + (v - low) / ((high - low) or 1) * (end - start)


def ticks(values: Sequence[float], place: Callable[[float], float], other: float, *, across: bool) -> str:
    low, high = min(values), max(values)
    marks = [low + (high - low) * i / 4 for i in range(5)]
    spots = [(place(m), other) if across else (other, place(m)) for m in marks]
    return "".join(f'<text x="{x:.0f}" y="{y:.0f}">{m:.3g}</text>' for m, (x, y) in zip(marks, spots, strict=True))


def dot(x: float, y: float, row: Row, best: bool) -> str:
    title = html.escape(f"{row['key']}: {row[COST]:.3f} s, {row[QUALITY]:.2f} dB")
    kind = "best" if best else "other"
    return f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'


PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>fewstep sweep</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem; }
svg { max-width: 60rem; width: 100%; } svg text { fill: currentColor; font-size: 12px; }
circle.other { fill: none; stroke: #888; } circle.best, tr.front td:first-child { fill: #c60; color: #c60; }
polyline { fill: none; stroke: #c60; } .scroll { overflow-x: auto; } table { border-spacing: 0; }
td, th { padding: .15rem .6rem; text-align: right; } th { cursor: pointer; }
td:first-child, th:first-child { text-align: left; white-space: nowrap; }
tr:nth-child(even) { background: color-mix(in srgb, currentColor 7%, transparent); } img { max-width: 100%; }
</style>
<h1>Quality and speed</h1>
<p>$machine</p>
<p>Noise floors, the reference setting under other seeds: $floors</p>
$scatter
<p>Joined: the settings that no other beats. Speed is of one picture, interleaved with the reference setting.</p>
<div class="scroll"><table><thead><tr>$head</tr></thead><tbody>
$body
</tbody></table></div>
$pictures
<script>
document.querySelectorAll("th").forEach((head, column) => head.onclick = () => {
  const body = document.querySelector("tbody"), up = head.dataset.up = head.dataset.up === "1" ? "" : "1";
  const value = row => { const t = row.cells[column].textContent; return isNaN(parseFloat(t)) ? t : parseFloat(t); };
  [...body.rows].sort((a, b) => (value(a) > value(b) ? 1 : -1) * (up ? 1 : -1)).forEach(row => body.append(row));
});
</script></html>
""")
