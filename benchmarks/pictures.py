"""Pictures of captions, each from a seed of its own: the same picture, whatever it shares a batch with."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def arguments(captions: Sequence[str], seeds: Sequence[int], **options: Any) -> dict[str, Any]:
    """Of one call of a pipeline; `options` as the pipeline takes them."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    return {"prompt": list(captions), "generator": generators, "output_type": "pt", **options}


def generate(
    pipe: Any, captions: Sequence[str], seeds: Sequence[int], *, batch_size: int = 20, **options: Any
) -> Tensor:
    """(N, 3, H, W) in 0..1, float32 on the CPU."""
    batches = [slice(i, i + batch_size) for i in range(0, len(captions), batch_size)]
    parts = [pipe(**arguments(captions[b], seeds[b], **options)).images for b in batches]
    return torch.cat(parts).float().cpu().clamp(0, 1)
