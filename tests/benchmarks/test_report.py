"""The front, and files that hold every row and need nothing beside them."""

import csv
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fewstep.benchmarks.report import grid, pareto, write

SMALL = st.integers(0, 5).map(float)
EVIL = "<script>alert('x')</script> & \"q\""


def row(key, cost=1.0, quality=30.0, **more):
    return {"key": key, "scheduler": "ddim", "steps": 4, "latency_s_p50": cost, "psnr": quality, **more}


@pytest.fixture
def rows():
    machine = {"processor": "P <i>1</i>", "torch": "2"}
    refused = {"key": "bf16 / ddim / 4 / 3", "scheduler": "ddim", "steps": 4, "refused": "needs <hardware>"}
    floors = {"psnr_floor": 11.5, "kid_floor": 0.01}
    return [row("plain", 2.0, machine=machine, **floors), row(EVIL, 1.0, 20.0, kid=-0.001), refused]


@given(st.lists(st.tuples(SMALL, SMALL), max_size=25))
def test_front_equals_brute_force(points):
    made = [row(str(i), cost, quality) for i, (cost, quality) in enumerate(points)]
    best = {
        (c, q) for c, q in points if not any(a <= c and b >= q and (a, b) != (c, q) for a, b in points)
    }  # as points: equal rows stand once
    front = pareto(made)
    assert [(r["latency_s_p50"], r["psnr"]) for r in front] == sorted(best)
    firsts = [next(r for r in made if (r["latency_s_p50"], r["psnr"]) == point) for point in sorted(best)]
    assert front == firsts


def test_front_leaves_out_rows_without_a_figure(rows):
    assert [r["key"] for r in pareto(rows)] == [EVIL, "plain"]


def test_grid_places_pictures_in_rows():
    dark, bright = torch.zeros(2, 3, 8, 8), torch.ones(3, 3, 8, 8)
    sheet = grid([dark, bright], ["", ""], margin=10)
    assert sheet.size == (10 + 3 * 8, 16)
    assert sheet.getpixel((10, 0)) == sheet.getpixel((25, 7)) == (0, 0, 0)
    assert sheet.getpixel((26, 0)) == (255, 255, 255)  # no third picture in the first row


def test_csv_and_json_round_trip(rows, tmp_path):
    write(rows, tmp_path)
    assert json.loads((tmp_path / "rows.json").read_text()) == rows
    with (tmp_path / "rows.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [r["key"] for r in read] == [r["key"] for r in rows]
    assert float(read[1]["kid"]) == rows[1]["kid"] and float(read[0]["psnr"]) == 30
    assert read[2]["refused"] == "needs <hardware>" and read[2]["psnr"] == ""
    assert "machine" not in read[0]


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.addresses = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data):
        self.words.append(data)


def test_page_is_escaped_complete_and_alone(rows, tmp_path):
    Image.new("RGB", (4, 4)).save(tmp_path / "p.png")
    rows[0]["pictures"] = "p.png"
    write(rows, tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("script") == 1 and "i" not in page.tags and "hardware" not in page.tags
    assert page.tags.count("tr") == 1 + len(rows)
    assert page.tags.count("circle") == 2
    assert {r["key"] for r in rows} <= set(page.words) and "needs <hardware>" in page.words
    assert len(page.addresses) == 1 and page.addresses[0].startswith("data:image/png;base64,")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.split("<script>")[0].split("base64,")[0])
    assert "psnr 11.5" in text


@pytest.mark.parametrize("present", [[], [{"key": "x", "refused": "no"}]])
def test_page_without_figures(present, tmp_path):
    write(present, tmp_path)
    assert "No row has both" in (tmp_path / "report.html").read_text()
