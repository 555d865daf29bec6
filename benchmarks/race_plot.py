"""Speed over PSNR as an SVG: a line for each contender, ours drawn through, peers' dashed."""

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#c60", "#06c", "#090", "#909", "#a33", "#077", "#660", "#339", "#666", "#c06", "#3aa")
WIDTH, HEIGHT, PAD = 900, 480, 50
CEILING = 70.0  # dB: what is nearer to plain is drawn here


def curves(fronts: Mapping[str, Sequence[Any]]) -> str:
    """`fronts`: by contender its points, each with `psnr`, `speed` and `ours`."""
    shown = {name: line for name, line in fronts.items() if line}
    spots = [point for line in shown.values() for point in line]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    body = "".join(drawn(i, name, line, Axes(spots)) for i, (name, line) in enumerate(shown.items()))
    labels = Axes(spots).labels() if spots else ""
    return f'{head}font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{labels}{body}</svg>\n'


class Axes:
    def __init__(self, spots: Sequence[Any]) -> None:
        self.low = min(p.psnr for p in spots)
        self.high = min(CEILING, max(p.psnr for p in spots))
        self.slow, self.fast = min(1.0, *(p.speed for p in spots)), max(p.speed for p in spots)

    def x(self, psnr: float) -> float:
        return PAD + (min(psnr, self.high) - self.low) / ((self.high - self.low) or 1) * (WIDTH - 2 * PAD - 230)

    def y(self, speed: float) -> float:
        return HEIGHT - PAD - (speed - self.slow) / ((self.fast - self.slow) or 1) * (HEIGHT - 2 * PAD)

    def labels(self) -> str:
        across = [self.low + (self.high - self.low) * i / 4 for i in range(5)]
        up = [self.slow + (self.fast - self.slow) * i / 4 for i in range(5)]
        marks = [f'<text x="{self.x(v):.0f}" y="{HEIGHT - PAD + 18}">{v:.0f}</text>' for v in across]
        marks += [f'<text x="12" y="{self.y(v):.0f}">{v:.2f}</text>' for v in up]
        marks.append(f'<text x="{PAD}" y="{HEIGHT - 10}">PSNR to the plain pictures of the same seeds, dB</text>')
        return "".join(marks) + '<text x="12" y="24">times as fast as plain</text>'


def drawn(place: int, name: str, line: Sequence[Any], axes: Axes) -> str:
    colour, dash = COLOURS[place % len(COLOURS)], "" if line[0].ours else ' stroke-dasharray="5"'
    spots = [(axes.x(p.psnr), axes.y(p.speed)) for p in line]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in spots)
    label = f'<text x="{WIDTH - 230}" y="{24 + 16 * place}" fill="{colour}">{name}</text>'
    return f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>{dots}{label}'
