"""`fewstep fit indicator`: what a change of a model's modulated input says about a change of what its blocks add.

TeaCache (Liu et al. 2024, arXiv:2411.19108, section 3.4) rescales the first by a polynomial that is fitted to the
second. Here it is fitted on the user's own model, pipeline and number of steps: each row of each evaluation gives one
pair of changes since the evaluation before. What the blocks add is all that a reuse would put in place of a
computation: every stream of every list of blocks, of a UNet the feature of its deep part.
"""

import inspect
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from ..errors import InvalidConfig
from ..patches import Patches
from ..pipeline import AcceleratedPipeline
from ..recipe import Recipe
from ..rows import RowStore
from ..target import Target
from .modulated import Accumulated, ModulatedCache, TeaCache
from .reuse import relative_change

FORMAT = 1
Pair = tuple[float, float]  # relative changes: of the modulated input, of what the blocks added

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help="Learn from your own model.")


@app.callback()
def fit() -> None:
    """Learn from your own model what a technique is set by."""


@app.command()
def indicator(
    model: Annotated[str, typer.Argument(help="emoji-unet, a pipeline folder, or a hub id")],
    prompts: Annotated[Path, typer.Option(help="a text file, one prompt a line")],
    out: Annotated[Path, typer.Option(help="the JSON file to write")] = Path("indicator.json"),
    steps: Annotated[int, typer.Option(min=2, help="denoising steps, as the recipe will be used with")] = 20,
    count: Annotated[int, typer.Option(min=1, help="prompts to run, from the top of the file")] = 8,
    degree: Annotated[int, typer.Option(min=1, help="of the polynomial")] = 4,
    seed: Annotated[int, typer.Option(help="prompt k starts from seed + k")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, mps; the best that there is if not given")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="print the fit as JSON")] = False,
) -> None:
    """Fit the polynomial that TeaCache rescales changes by."""
    from ..doctor import best_device
    from ..zoo import embedded

    words = read(prompts)[:count]
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidConfig(f"--dtype {dtype!r} is not one of float32, bfloat16, float16")
    try:
        place = torch.device(device or best_device())
    except RuntimeError:
        raise InvalidConfig(f"--device {device!r} is no device of torch: cpu, cuda, cuda:1, mps, xpu") from None
    out.parent.mkdir(parents=True, exist_ok=True)  # a folder that cannot be written fails before the work
    pipe = embedded.load(model, dtype=getattr(torch, dtype)).to(place)
    pairs = pairs_of(pipe, words, steps, seed, quiet=as_json)
    found = {"format": FORMAT, "model": type(Target.of_pipeline(pipe).denoiser).__name__} | fitted(pairs, degree)
    out.write_text(json.dumps(found, indent=2) + "\n")
    typer.echo(json.dumps(found) if as_json else told(found, out))


def told(found: dict[str, Any], out: Path) -> str:
    low, high = found["range"]
    return (
        f"{found['model']}: {found['pairs']} pairs, changes of the input from {low:.3g} to {high:.3g}, "
        f"R2 {found['r2']:.3f} (1: the input tells all, 0: nothing)\n"
        f"{out}: use it as TeaCache.from_file({str(out)!r}, threshold=0.15)"
    )


def read(path: Path) -> list[str]:
    """The prompts of a file; raises `InvalidConfig` for none."""
    try:
        found = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InvalidConfig(f"--prompts {path}: {error.strerror}: give a text file with one prompt a line") from None
    if not found:
        raise InvalidConfig(f"--prompts {path} is empty: write one prompt a line")
    return found


# ---------------------------------------------------------------------------------------------------- measuring


def pairs_of(pipe: Any, prompts: Sequence[str], steps: int, seed: int = 0, quiet: bool = True) -> list[Pair]:
    """What the plain pipeline's evaluations say; it is as before afterwards. Raises `InvalidConfig` for one that takes
    no prompt, `Unsupported` where TeaCache is."""
    known = inspect.signature(type(pipe).__call__).parameters
    if "prompt" not in known:
        raise InvalidConfig(f"{type(pipe).__name__} takes no prompt: nothing to fit an indicator on")
    options = {"output_type": "latent"} if "output_type" in known else {}
    pipe.set_progress_bar_config(disable=True)
    technique = Recorder()
    fast = AcceleratedPipeline(pipe, Recipe(technique))
    try:
        for place, prompt in enumerate(shown(prompts, quiet)):
            rng = torch.Generator().manual_seed(seed + place)
            fast.run(prompt=prompt, num_inference_steps=steps, generator=rng, **options)
    finally:
        fast.detach()
    return technique.pairs


def shown(prompts: Sequence[str], quiet: bool) -> Any:
    from rich.console import Console
    from rich.progress import track

    return prompts if quiet else track(prompts, "plain runs", console=Console(stderr=True))


@dataclass(frozen=True, kw_only=True)
class Recorder(TeaCache):
    """A TeaCache that never reuses, and writes down what it sees."""

    threshold: float = 0.0
    pairs: list[Pair] = field(default_factory=list[Pair], compare=False)

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            cache = RecordingCache(self.name, denoiser, self.policy)
            cache.pairs = self.pairs
            self.put_on(cache, patches)


class RecordingCache(ModulatedCache):
    pairs: list[Pair]

    def fresh(self) -> "Recorded":
        return Recorded(self)

    def around(self, inner: Any, *args: Any, **kwargs: Any) -> Any:
        output = super().around(inner, *args, **kwargs)
        state = self.state()
        assert isinstance(state, Recorded)
        self.pairs += state.finish()
        return output

    def say(self, run: Any, state: Any) -> None:
        """Nothing: that it never reuses is what it is for."""


class Recorded(Accumulated):
    """Keeps the changes of both of the evaluation in progress."""

    def __init__(self, cache: ModulatedCache) -> None:
        super().__init__(cache)
        self.added_before = RowStore()
        self.inputs: list[float] = []

    def change(self, feature: torch.Tensor) -> list[float]:
        self.inputs = super().change(feature)
        return self.inputs

    def finish(self) -> list[Pair]:
        """Pairs of the rows that were evaluated before."""
        now = self.added_now()
        known = all(self.added_before.ages(key) for key in self.keys)
        (before,) = self.added_before.get(self.keys) if known else (None,)
        self.added_before.put(self.keys, (now,))
        if before is None or before.shape != now.shape:
            return []
        outputs = relative_change(now, before, len(self.rows))
        return [pair for pair in zip(self.inputs, outputs, strict=True) if all(map(math.isfinite, pair))]

    def added_now(self) -> torch.Tensor:
        """All that the blocks of the evaluation added, one row each."""
        kept = [value for store in self.spans.values() for value in store.get(self.keys) if value is not None]
        return torch.cat([value.float().reshape(len(self.rows), -1) for value in kept], dim=1)


# ---------------------------------------------------------------------------------------------------- fitting


def fitted(pairs: Sequence[Pair], degree: int) -> dict[str, Any]:
    """The least-squares polynomial of the second over the first, highest power first, and how much it explains."""
    if len(pairs) < 2 * (degree + 1):
        raise InvalidConfig(
            f"{len(pairs)} pairs are too few for a polynomial of degree {degree}, which wants {2 * (degree + 1)}: give "
            "more steps or prompts, or a lower degree"
        )
    x, y = np.asarray(pairs).T
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", np.exceptions.RankWarning)
        coefficients = np.polyfit(x, y, degree)
    if caught or np.ptp(x) == 0:
        raise InvalidConfig(
            f"the measured changes lie too close together for a polynomial of degree {degree}: give a lower degree, or "
            "prompts and steps that differ more"
        )
    left, all_of_it = np.square(y - np.polyval(coefficients, x)).sum(), np.square(y - y.mean()).sum()
    return {
        "pairs": len(pairs),
        "coefficients": coefficients.tolist(),
        "r2": float(1 - left / all_of_it) if all_of_it else 1.0,
        "range": [float(x.min()), float(x.max())],
    }
