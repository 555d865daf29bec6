"""A sweep of a tiny pipeline: complete rows, a way back, and going on where it stopped."""

import dataclasses
import json
import math

import pytest

from fewstep import Recipe
from fewstep.accel import catalog
from fewstep.accel.cache.text import TextCache
from fewstep.accel.errors import InvalidConfig, InvalidRecipe
from fewstep.accel.kernels.compile import CompileBlocks
from fewstep.accel.kernels.precision import Bfloat16
from fewstep.accel.zoo.tiny import tiny
from fewstep.benchmarks import report
from fewstep.benchmarks.prompts import Prompts, drawn
from fewstep.benchmarks.sweep import Setting, Sweep, SweepConfig, recipe_of, spread

CONFIG = SweepConfig(schedulers=("ddim", "euler"), steps=(1, 2), guidance=(2.0,), repeats=2, batch_size=3)
PAIRED = ("psnr", "ssim", "perceptual", "kid")
COST = ("nfe", "multiply_adds", "peak_bytes", "latency_s_p50", "latency_s_p90")
SPEED = ("speedup_low", "speedup", "speedup_high")


def run(pipe, out, config=CONFIG, prompts=None):
    measured = []

    def through(settings):
        for setting in settings:
            measured.append(setting.key)
            yield setting

    return Sweep(pipe, prompts or drawn("train", 4, 0), config, out).run(through), measured


def bare(pipe):
    modules = [m for part in pipe.components.values() if hasattr(part, "modules") for m in part.modules()]
    return not any("forward" in vars(m) or "decode" in vars(m) for m in modules)


@pytest.fixture(scope="module")
def pipe():
    return tiny("sd")


@pytest.fixture(scope="module")
def swept(pipe, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    return out, run(pipe, out)[0]


def test_rows_are_complete(swept):
    rows = swept[1]
    assert [r["key"] for r in rows] == [s.key for s in CONFIG.settings()]
    for row in rows:
        known = ("top1", "top5", "kid_data", "group_accuracy", "style_accuracy")
        floors = (f"{name}_floor" for name in (*PAIRED, "top1", "kid_data", "group_accuracy"))
        figures = (*PAIRED, *known, *floors)
        assert all(isinstance(row[name], float) for name in (*figures, *SPEED))
        assert all(row[name] > 0 for name in COST)
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["count"] == 4 and row["machine"]["torch"]
        assert row["nfe"] == 2 * row["steps"]  # guidance


def test_reference_is_its_own_equal_and_the_others_are_not(swept):
    rows = {r["key"]: r for r in swept[1]}
    itself = rows["plain / ddim / 2 / 2"]
    assert (itself["psnr"], itself["ssim"], itself["perceptual"]) == (100, pytest.approx(1), 0)
    assert itself["kid"] == pytest.approx(0, abs=1e-9)
    assert itself["psnr_floor"] < 30
    assert all(r["psnr"] < 100 for key, r in rows.items() if key != itself["key"])
    assert rows["plain / ddim / 1 / 2"]["multiply_adds"] < itself["multiply_adds"]


def test_pipeline_is_plain_afterwards(pipe, swept):
    assert bare(pipe) and type(pipe.scheduler) is type(tiny("sd").scheduler)


def test_finished_rows_are_not_measured_again(pipe, swept):
    out, rows = swept
    before = (out / "rows.jsonl").read_bytes()
    again, measured = run(pipe, out)
    assert (again, measured) == (rows, []) and (out / "rows.jsonl").read_bytes() == before


def test_stopped_sweep_goes_on(pipe, swept, tmp_path):
    (tmp_path / "sweep.json").write_bytes((swept[0] / "sweep.json").read_bytes())
    lines = (swept[0] / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:3]))
    rows, measured = run(pipe, tmp_path)
    assert measured == [CONFIG.settings()[3].key]
    assert rows[:3] == swept[1][:3]
    assert {n: rows[3][n] for n in PAIRED} == {n: swept[1][3][n] for n in PAIRED}  # same seeds, same pictures


@pytest.mark.parametrize(
    ("change", "count", "message"),
    [
        ({}, 5, "another captions"),
        ({"seed": 1}, 4, "another seed"),
        ({"steps": (1, 3)}, 4, "another reference"),
    ],
)
def test_other_sweeps_in_the_folder_are_refused(pipe, swept, change, count, message):
    with pytest.raises(InvalidConfig, match=message):
        run(pipe, swept[0], dataclasses.replace(CONFIG, **change), drawn("train", count, 0))
    assert json.loads((swept[0] / "sweep.json").read_text())["seed"] == 0


@pytest.mark.parametrize("change", [{"recipes": ("fastest",)}, {"schedulers": ("dddim",)}, {"recipes": ("no.json",)}])
def test_unknown_names_are_refused_before_any_work(pipe, tmp_path, change):
    with pytest.raises(InvalidRecipe):
        Sweep(pipe, drawn("train", 4, 0), dataclasses.replace(CONFIG, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_refusal_is_a_row_and_other_recipes_leave_the_reference_alone(pipe, tmp_path):
    """bfloat16 changes the weights: the reference beside it, and what comes after it, must not see that."""
    files = {name: str(tmp_path / f"{name}.json") for name in ("refused", "half")}
    Recipe(CompileBlocks(backend="nonesuch")).save(files["refused"])
    Recipe(TextCache(), Bfloat16(), num_inference_steps=9).save(files["half"])
    weights = [p.clone() for p in pipe.unet.parameters()]
    config = dataclasses.replace(CONFIG, schedulers=("ddim",), steps=(2,), recipes=(*files.values(), "plain"))
    rows, _ = run(pipe, tmp_path / "out", config, Prompts(captions=["a", "b", "c", "d"]))
    refused, half, plain = rows
    assert "no backend 'nonesuch'" in refused["refused"] and "psnr" not in refused
    assert 20 < half["psnr"] < 100 and half["nfe"] == 4 and "TextCache" in half["resolved"]
    assert plain["psnr"] == 100
    assert "top1" not in plain and "kid_data" not in plain  # nobody knows what these pictures must show
    assert bare(pipe) and all((a == b).all() for a, b in zip(weights, pipe.unet.parameters(), strict=True))


def test_report_of_a_sweep_shows_every_setting(swept):
    out, rows = swept
    report.write(rows, out)
    text = (out / "report.html").read_text()
    assert text.count("data:image/png") == len(rows) == len(list((out / "pictures").iterdir()))


def test_reference_setting():
    assert CONFIG.reference == Setting(scheduler="ddim", steps=2, guidance=2.0)
    assert CONFIG.reference in CONFIG.settings()


@pytest.mark.parametrize("name", list(catalog.TECHNIQUES))
def test_every_technique_is_swept_through_its_space(name):
    names = spread(("plain", name))
    settings = [recipe_of(n, None).techniques[0] for n in names[1:]]
    space = catalog.example(name).space()
    assert names[0] == "plain" and len(set(settings)) == math.prod(len(v) for v in space.values())
    assert all(type(s) is catalog.technique(name) for s in settings)


def test_a_technique_in_its_space_with_the_scheduler_that_is_there(pipe, tmp_path):
    names = tuple(n for n in spread(("deep_cache",)) if "depth=1" in n)[:2]
    config = dataclasses.replace(CONFIG, schedulers=("own",), steps=(3,), recipes=("plain", *names))
    rows, _ = run(pipe, tmp_path / "out", config, Prompts(captions=["a", "b", "c", "d"]))
    assert [r["recipe"] for r in rows] == ["plain", *names] and {r["scheduler"] for r in rows} == {"own"}
    assert rows[0]["psnr"] == 100 > max(r["psnr"] for r in rows[1:])
    assert max(r["multiply_adds"] for r in rows[1:]) < rows[0]["multiply_adds"]
