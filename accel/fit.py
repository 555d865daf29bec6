"""`fewstep fit`: what a technique is set by, learned from the user's own model."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .cache import fit_indicator, fit_steps
from .errors import InvalidConfig
from .loading import Device, Dtype, Model, loaded, need_place

Prompts = Annotated[Path, typer.Option(help="a text file, one prompt a line")]
Count = Annotated[int, typer.Option(min=1, help="prompts to run, from the top of the file")]
Seed = Annotated[int, typer.Option(help="prompt k starts from seed + k")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Learn from your own model.")


@app.callback()
def fit() -> None:
    """Learn from your own model what a technique is set by."""


@app.command()
def indicator(
    model: Model,
    prompts: Prompts,
    out: Annotated[Path, typer.Option(help="the JSON file to write")] = Path("indicator.json"),
    steps: Annotated[int, typer.Option(min=2, help="denoising steps, as the recipe will be used with")] = 20,
    count: Count = 8,
    degree: Annotated[int, typer.Option(min=1, help="of the polynomial")] = 4,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Fit the polynomial that TeaCache rescales changes by."""
    need_place(device, dtype)
    words = read(prompts)[:count]
    out.parent.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails before the work
    pipe = loaded(model, device, dtype)
    pairs = fit_indicator.pairs_of(pipe, words, steps, seed, quiet=as_json)
    found = fit_indicator.described(pipe, pairs, degree)
    out.write_text(json.dumps(found, indent=2) + "\n")
    typer.echo(json.dumps(found) if as_json else fit_indicator.told(found, out))


@app.command(name="steps")
def computed_steps(
    model: Model,
    prompts: Prompts,
    computed: Annotated[int, typer.Option(min=1, help="how many evaluations are computed, the others reused")],
    recipe: Annotated[str, typer.Option(help="forecast, deep_cache, or a recipe.json, whose mask is gone on from")] = (
        "forecast"
    ),
    out: Annotated[Path, typer.Option(help="the recipe to write, anew at each improvement")] = Path("recipe.json"),
    steps: Annotated[int, typer.Option(min=2, help="denoising steps, as the recipe will be used with")] = 20,
    guidance: Annotated[float | None, typer.Option(help="guidance scale; the pipeline's own if not given")] = None,
    count: Count = 8,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Search the steps at which a cache computes: those that bring the latents nearest to the plain ones."""
    need_place(device, dtype)
    words = read(prompts)[:count]
    cache = fit_steps.settable(recipe)
    out.parent.mkdir(parents=True, exist_ok=True)
    options = {} if guidance is None else {"guidance_scale": guidance}
    trials = fit_steps.Trials(loaded(model, device, dtype), cache, words, seed, num_inference_steps=steps, **options)
    found = fit_steps.searched(trials, computed, out, quiet=as_json)
    typer.echo(json.dumps(found) if as_json else fit_steps.told(found, out))


def read(path: Path) -> list[str]:
    """The prompts of a file; raises `InvalidConfig` for none."""
    try:
        found = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InvalidConfig(f"--prompts {path}: {error.strerror}: give a text file with one prompt a line") from None
    if not found:
        raise InvalidConfig(f"--prompts {path} is empty: write one prompt a line")
    return found
