"""`fewstep sweep` and `fewstep demo`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Option(help="emoji-unet, a pipeline folder, or a hub id")]
Json = Annotated[bool, typer.Option("--json", help="print the rows as JSON, without tables and bars")]
RECIPES = "plain, presets, recipe.json files, or techniques (each spread over its space), with commas"
SCHEDULERS = "ddim,euler,dpmpp_2m,unipc,deis,heun"


def sweep(
    model: Model = "emoji-unet",
    schedulers: Annotated[str, typer.Option(help="names, with commas; own: the pipeline's")] = SCHEDULERS,
    steps: Annotated[str, typer.Option(help="whole numbers, with commas")] = "2,4,6,10,20,50",
    guidance: Annotated[str, typer.Option(help="guidance scales, with commas")] = "3",
    recipes: Annotated[str, typer.Option(help=RECIPES)] = "plain",
    count: Annotated[int, typer.Option(min=4, help="pictures a setting")] = 100,
    repeats: Annotated[int, typer.Option(min=2, help="timed calls a setting")] = 5,
    prompts: Annotated[Path | None, typer.Option(help="a file, one prompt a line; other models need it")] = None,
    split: Annotated[str, typer.Option(help="captions of emoji-unet: train or test")] = "train",
    seed: Annotated[int, typer.Option(help="draws the captions; picture k starts from seed + k")] = 0,
    out: Annotated[Path, typer.Option(help="folder of results; one that stopped goes on")] = Path("sweep"),
    as_json: Json = False,
) -> None:
    """Schedulers x steps x guidance x recipes: quality and speed of each, CSV, JSON and an HTML report."""
    import torch

    from ..accel import catalog
    from ..accel.pipeline import known
    from ..accel.zoo import embedded
    from .prompts import choose
    from .report import write
    from .sweep import Sweep, SweepConfig, spread

    asked = words("--recipes", recipes)
    for name in set(asked) - set(catalog.TECHNIQUES):
        known(name)  # before any weight is read
    config = SweepConfig(
        schedulers=words("--schedulers", schedulers),
        steps=numbers("--steps", steps, int),
        guidance=numbers("--guidance", guidance, float),
        recipes=spread(asked),
        repeats=repeats,
        seed=seed,
    )
    chosen = choose(model, prompts, split, count, seed)
    torch.set_num_threads(1)  # a busy neighbour slows two threads far more than one
    pipe = embedded.load(model)
    pipe.set_progress_bar_config(disable=True)
    rows = Sweep(pipe, chosen, config, out).run(bar(not as_json))
    write(rows, out)
    show(rows, as_json)


bench = typer.Typer(no_args_is_help=True, help="Measure against other libraries.")


@bench.callback()
def _group() -> None:
    """Measure against other libraries."""


@bench.command()
def peers(
    model: Annotated[
        str, typer.Option(help="an embedded model, or a folder with the emoji captions' model")
    ] = "emoji-unet",
    steps: Annotated[int, typer.Option(min=2)] = 25,
    guidance: Annotated[float, typer.Option()] = 3.0,
    count: Annotated[int, typer.Option(min=4, help="pictures compared a setting")] = 32,
    repeats: Annotated[int, typer.Option(min=3, help="pairs of calls timed a setting")] = 9,
    precision: Annotated[str, typer.Option(help="fp32 or bf16")] = "fp32",
    out: Annotated[Path, typer.Option(help="folder of results; one that stopped goes on")] = Path("peers"),
    as_json: Json = False,
) -> None:
    """Our caches against DeepCache, cache-dit and diffusers' hooks: speed at equal distance to the plain pictures."""
    import torch

    from ..accel.errors import InvalidConfig
    from .head_to_head import HeadToHead, Race, write

    if precision not in ("fp32", "bf16"):
        raise InvalidConfig(f"--precision {precision!r} is not one of fp32, bf16")
    torch.set_num_threads(1)
    race = Race(model=model, steps=steps, guidance=guidance, count=count, repeats=repeats, precision=precision)
    found = write(HeadToHead(race, out).run(bar(not as_json)), race, out)
    typer.echo(json.dumps(found["ours_to_peer_at_equal_psnr"], indent=1))


def demo(
    out: Annotated[Path, typer.Option(help="folder for the picture and the table")] = Path("demo"),
    recipe: Annotated[str, typer.Option(help="the accelerated row: a preset or a recipe.json")] = "balanced",
    count: Annotated[int, typer.Option(min=1, help="captions")] = 8,
    seed: Annotated[int, typer.Option(help="draws the captions and the noise")] = 0,
    as_json: Json = False,
) -> None:
    """The embedded model on a handful of captions, plain beside accelerated: a picture and a table."""
    from .demo import run

    run(out, recipe, count, seed, as_json)


def words(option: str, text: str) -> tuple[str, ...]:
    """Each word once. Raises InvalidConfig if there is none."""
    from ..accel.errors import InvalidConfig

    found = dict.fromkeys(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise InvalidConfig(f"{option} is empty: give at least one, with commas between them")
    return tuple(found)


def numbers(option: str, text: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """Each number once. Raises InvalidConfig for what is no number of that kind above zero."""
    from ..accel.errors import InvalidConfig

    parts = words(option, text)
    try:
        found = dict.fromkeys(kind(part) for part in parts)
    except ValueError:
        whole = "whole " if kind is int else ""
        raise InvalidConfig(f"{option} {text!r} must be {whole}numbers with commas, for instance 4,8,20") from None
    if not all(0 < number < float("inf") for number in found):
        raise InvalidConfig(f"{option} {text!r} must hold positive numbers")
    return tuple(found)


def bar(shown: bool) -> Any:
    """Goes through settings, with a progress bar that names the one in work."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    def through(settings: Sequence[Any]) -> Iterator[Any]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not shown) as progress:
            task = progress.add_task("", total=len(settings))
            for setting in settings:
                progress.update(task, description=setting.key)
                yield setting
                progress.advance(task)

    return through


# Column of a row, its heading, its format: what fits a terminal; the files hold the rest.
COLUMNS = (
    ("latency_s_p50", "s", ".3f"),
    ("speedup", "x", ".2f"),
    ("nfe", "nfe", "d"),
    ("psnr", "psnr", ".1f"),
    ("perceptual", "perc.", ".2f"),
    ("kid", "kid", ".4f"),
    ("kid_data", "kid data", ".4f"),
    ("top1", "top-1", ".2f"),
)


def show(rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    if as_json:
        typer.echo(json.dumps(list(rows), indent=1))
        return
    present = [c for c in COLUMNS if any(c[0] in row for row in rows)]
    table = Table(
        Column("setting", overflow="fold", width=26),
        *(heading for _, heading, _ in present),
        box=SIMPLE_HEAD,
        padding=0,
    )
    for row in rows:
        cells = [format(row[name], form) if name in row else "" for name, _, form in present]
        table.add_row(row["key"], *(cells if "refused" not in row else [row["refused"]]))
    floors = next((row for row in rows if "psnr_floor" in row), {})
    cells = [format(floors[f"{name}_floor"], form) if f"{name}_floor" in floors else "" for name, _, form in present]
    table.add_row("floor", *cells, style="dim")
    Console().print(table)
