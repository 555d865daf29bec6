"""What a cache costs beside the work that it leaves, on large denoisers: `python -m fewstep.benchmarks.shapes`.

Random weights in the shapes of SD 1.5, SDXL and Flux, at least 200 M parameters each. A reused evaluation is timed
beside the layers that are left to compute, cut out of the model and called by hand, a computed one beside the plain
model. Operations of both must be equal: nothing that is reused may be computed in secret.
"""

import copy
import functools
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from rich.progress import track
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..accel.cache.deep import DeepCache
from ..accel.cache.first_block import FirstBlockCache
from ..accel.cache.forecast import Forecast
from ..accel.denoiser import accelerate, run
from ..accel.policy import Every
from ..accel.recipe import Recipe
from ..accel.technique import Technique
from .timing import interleaved, interval, machine, seconds

RESULTS = Path("benchmarks/results/shapes")
ALWAYS = Every(1_000_000)  # reuses whatever can be
Call = Callable[[], Any]
Key = tuple[Any, ...]  # what a row of a table is found by
Job = Callable[[], dict[str, Any]]  # measures what else stands in it


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its arguments for so many rows, and the layers that are left where all that can be is reused."""

    model: Callable[[], Any]
    inputs: Callable[[int], dict[str, Any]]
    guided: bool  # two rows an image

    def rows(self, images: int) -> int:
        return 2 * images if self.guided else images


def sd15() -> Any:
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(160, 320, 640, 640), cross_attention_dim=768, attention_head_dim=8
    )


def sdxl() -> Any:
    attending = "CrossAttnDownBlock2D"
    kind: Any = UNet2DConditionModel
    return kind(
        sample_size=16,
        block_out_channels=(128, 256, 512),
        down_block_types=("DownBlock2D", attending, attending),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2, 10),
        attention_head_dim=(2, 4, 8),
        cross_attention_dim=2048,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )


def flux() -> Any:
    return FluxTransformer2DModel(
        num_layers=5,
        num_single_layers=10,
        num_attention_heads=6,
        attention_head_dim=128,
        joint_attention_dim=4096,
        guidance_embeds=True,
    )


def unet_inputs(rows: int, width: int) -> dict[str, Any]:
    latents, text = drawn(rows, 4, 16, 16), drawn(rows, 77, width)
    return {"sample": latents, "timestep": torch.tensor(500), "encoder_hidden_states": text}


def sdxl_inputs(rows: int) -> dict[str, Any]:
    added = {"text_embeds": drawn(rows, 1280), "time_ids": torch.full((rows, 6), 128.0)}
    return unet_inputs(rows, 2048) | {"added_cond_kwargs": added}


def flux_inputs(rows: int) -> dict[str, Any]:
    places = torch.zeros(64, 3)
    places[:, 1:] = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0))
    return {
        "hidden_states": drawn(rows, 64, 64),
        "encoder_hidden_states": drawn(rows, 32, 4096),
        "pooled_projections": drawn(rows, 768),
        "timestep": torch.full((rows,), 0.5),
        "guidance": torch.full((rows,), 3.5),
        "img_ids": places,
        "txt_ids": torch.zeros(32, 3),
    }


def drawn(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


SHAPES = {
    "sd15": Shape(model=sd15, inputs=lambda rows: unet_inputs(rows, 768), guided=True),
    "sdxl": Shape(model=sdxl, inputs=sdxl_inputs, guided=True),
    "flux": Shape(model=flux, inputs=flux_inputs, guided=False),
}


# ------------------------------------------------------------------------------------------------ what is left


def edge_of_unet(unet: Any, inputs: dict[str, Any]) -> Call:
    """Only the layers next to the picture: what DeepCache at depth 0 computes, given the deep feature."""
    seen: dict[str, Tensor] = {}
    last = unet.up_blocks[-1]
    hook = last.resnets[-1].register_forward_pre_hook(lambda _, args: seen.update(cat=args[0]))
    unet(**inputs)
    hook.remove()
    deep = seen["cat"][:, : -unet.conv_in.out_channels].clone()

    def call() -> Tensor:
        sample, text = inputs["sample"], inputs["encoder_hidden_states"]
        time = unet.time_embedding(unet.get_time_embed(sample, inputs["timestep"]))
        added = unet.get_aug_embed(time, text, inputs.get("added_cond_kwargs"))
        time = time if added is None else time + added
        hidden = last.resnets[-1](torch.cat([deep, unet.conv_in(sample)], dim=1), time)
        if attentions := getattr(last, "attentions", None):
            hidden = attentions[-1](hidden, encoder_hidden_states=text, return_dict=False)[0]
        return unet.conv_out(unet.conv_act(unet.conv_norm_out(hidden)))

    return call


def flux_of(blocks: int) -> Callable[[Any, dict[str, Any]], Call]:
    """A Flux of its first `blocks` blocks, sharing the weights."""

    def cut(model: Any, inputs: dict[str, Any]) -> Call:
        short = copy.copy(model)
        short._modules = dict(model._modules)
        short.transformer_blocks = model.transformer_blocks[:blocks]
        short.single_transformer_blocks = nn.ModuleList()
        return lambda: short(**inputs)

    return cut


@dataclass(frozen=True, kw_only=True)
class Case:
    """One technique on one shape: set to reuse whatever it can, set to reuse nothing, and what is left by hand."""

    shape: str
    reusing: Technique
    computing: Technique
    left: Callable[[Any, dict[str, Any]], Call]


ALL_BUT_FIRST = FirstBlockCache(threshold=1e9, max_consecutive=1_000_000)
CASES = (
    Case(shape="sd15", reusing=DeepCache(when=ALWAYS), computing=DeepCache(when=Every(1)), left=edge_of_unet),
    Case(shape="sd15", reusing=Forecast(when=ALWAYS), computing=Forecast(when=Every(1)), left=edge_of_unet),
    Case(shape="sdxl", reusing=DeepCache(when=ALWAYS), computing=DeepCache(when=Every(1)), left=edge_of_unet),
    Case(shape="flux", reusing=ALL_BUT_FIRST, computing=FirstBlockCache(threshold=0.0), left=flux_of(1)),
    Case(shape="flux", reusing=Forecast(when=ALWAYS), computing=Forecast(when=Every(1)), left=flux_of(0)),
)


# --------------------------------------------------------------------------------------------------- measuring


def main(
    out: Annotated[Path, typer.Option(help="folder of shapes.json; one that stopped goes on")] = RESULTS,
    batches: Annotated[str, typer.Option(help="images a call, with commas")] = "1,16",
    budget: Annotated[float, typer.Option(min=1, help="seconds for each row of the table")] = 40.0,
) -> None:
    """Milliseconds that a cache adds to a reused and to a computed evaluation, with 95 % intervals."""
    torch.set_num_threads(1)
    jobs: dict[Key, Job] = {
        (case.shape, case.reusing.name, int(images)): functools.partial(measured, case, int(images), budget)
        for images in batches.split(",")
        for case in CASES
    }
    for row in completed(out / "shapes.json", ("shape", "technique", "images"), jobs):
        typer.echo(line(row))


def completed(file: Path, names: Sequence[str], jobs: Mapping[Key, Job]) -> list[dict[str, Any]]:
    """The rows of `file`, each found by its values of `names`. Those that it lacks are measured, and on disk before the
    next begins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    done = {tuple(row[name] for name in names) for row in rows}
    for key in track([key for key in jobs if key not in done], file.stem):
        rows.append(dict(zip(names, key, strict=True)) | jobs[key]() | {"machine": machine()})
        file.write_text(json.dumps(rows, indent=1) + "\n")
        gc.collect()  # an accelerated model and what stands on it hold each other, and these are large
    return rows


@torch.no_grad()
def measured(case: Case, images: int, budget: float) -> dict[str, Any]:
    shape = SHAPES[case.shape]
    torch.manual_seed(0)
    model = shape.model().eval()
    inputs = shape.inputs(shape.rows(images))
    plain = copy.deepcopy(model)  # what an accelerated model is made of is wrapped
    reused = extra(model, case.reusing, inputs, case.left(plain, inputs), budget)
    computed = extra(copy.deepcopy(plain), case.computing, inputs, lambda: plain(**inputs), budget)
    return {
        "rows": shape.rows(images),
        "parameters": sum(p.numel() for p in model.parameters()),
        "reused": reused,
        "computed": computed,
    }


def extra(model: Any, technique: Technique, inputs: dict[str, Any], beside: Call, budget: float) -> dict[str, Any]:
    """Operations of an evaluation and of `beside`, and the milliseconds by which the evaluation is slower."""
    accelerate(model, Recipe(technique))
    with run() as state:

        def evaluation() -> None:
            model(**inputs)
            state.advance()

        evaluation()
        evaluation()
        operations = [count(evaluation), count(beside)]
        pairs = paired(evaluation, beside, budget)
    slower = [1e3 * (a - b) for a, b in pairs]
    return {
        "operations": operations,
        "milliseconds": 1e3 * float(np.median([b for _, b in pairs])),
        "extra_ms": [float(np.median(slower)), *interval(slower)],
        "pairs": len(pairs),
    }


def count(call: Call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def paired(a: Call, b: Call, budget: float) -> list[tuple[float, float]]:
    """As many pairs as `budget` seconds allow: 5 to 200."""
    return interleaved(a, b, int(min(max(budget / (seconds(a) + seconds(b)), 5), 200)))


def line(row: dict[str, Any]) -> str:
    parts = [
        f"{kind} {row[kind]['milliseconds']:8.1f} ms + {row[kind]['extra_ms'][0]:6.2f} "
        f"({row[kind]['extra_ms'][1]:.2f}..{row[kind]['extra_ms'][2]:.2f})"
        for kind in ("reused", "computed")
    ]
    return f"{row['shape']:5s} {row['technique']:18s} {row['images']:3d}  " + "   ".join(parts)


if __name__ == "__main__":
    typer.run(main)
