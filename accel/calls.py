"""Calls of a pipeline that are made to learn from: one prompt each, from a seed of its own, as far as the latents."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .errors import InvalidConfig


def calls(pipe: Any, prompts: Sequence[str], seed: int, **options: Any) -> Iterator[dict[str, Any]]:
    """Keywords for the pipeline; prompt k is drawn from seed + k. Raises `InvalidConfig` for a pipeline that does not
    take them."""
    known = inspect.signature(type(pipe).__call__).parameters
    for name in ("prompt", *options):
        if name not in known:
            raise InvalidConfig(f"{type(pipe).__name__} takes no {name}: there is nothing to learn from its calls")
    latents = {"output_type": "latent"} if "output_type" in known else {}
    for place, prompt in enumerate(prompts):
        rng = torch.Generator().manual_seed(seed + place)
        yield {"prompt": prompt, "generator": rng} | latents | options
