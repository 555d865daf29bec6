"""`fewstep generate`: pictures from any pipeline folder or hub id."""

import json
from pathlib import Path
from typing import Annotated

import typer

from .loading import Device, Dtype, loaded, need_place

Prompts = Annotated[list[str], typer.Argument(help="one or more prompts")]
Model = Annotated[str, typer.Option(help="emoji-unet, a pipeline folder, or a hub id")]
RecipeName = Annotated[str, typer.Option(help="plain, exact, precise, balanced, fast (they compile first), or a file")]


def generate(
    prompts: Prompts,
    model: Model = "emoji-unet",
    recipe: RecipeName = "plain",
    steps: Annotated[
        int | None, typer.Option(min=1, help="denoising steps; the recipe's or pipeline's own if not given")
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="guidance scale")] = None,
    seed: Annotated[int, typer.Option(help="picture k of prompt p starts from seed + its place")] = 0,
    count: Annotated[int, typer.Option(min=1, help="pictures per prompt")] = 1,
    out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("out"),
    device: Device = None,
    dtype: Dtype = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Generate pictures and say what it took."""
    import torch

    from .pipeline import AcceleratedPipeline, known

    need_place(device, dtype)
    chosen = known(recipe)
    pipe = loaded(model, device, dtype)
    out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails before the work
    pipe.set_progress_bar_config(disable=as_json)
    fast = AcceleratedPipeline(pipe, chosen)
    rows = [prompt for prompt in prompts for _ in range(count)]
    options = {"num_inference_steps": steps, "guidance_scale": guidance}
    given = {name: value for name, value in options.items() if value is not None}
    generators = [torch.Generator("cpu").manual_seed(seed + i) for i in range(len(rows))]
    result = fast.run(rows, generator=generators, **given)
    files = save(result.output.images, rows, out)
    if as_json:
        report = {
            "files": files,
            "total_s": result.report.total_s,
            "nfe": result.report.nfe,
            "recipe": fast.recipe.to_dict(),
        }
        typer.echo(json.dumps(report))
    else:
        typer.echo(f"{fast.explain()}\n{result.report}\n" + "\n".join(files))


def save(images: list, prompts: list[str], out: Path) -> list[str]:  # type: ignore[type-arg]  # PIL images
    files: list[str] = []
    for place, (image, prompt) in enumerate(zip(images, prompts, strict=True)):
        name = "".join(c if c.isalnum() else "-" for c in prompt)[:60].strip("-") or "picture"
        files.append(str(out / f"{place:03d}-{name}.png"))
        image.save(files[-1])
    return files
