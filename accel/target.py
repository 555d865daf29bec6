"""What a recipe is applied to: a pipeline with its parts by role, or one denoiser alone."""

from dataclasses import dataclass
from typing import Any

from diffusers import DiffusionPipeline
from torch import nn

from . import anatomy
from .errors import Unsupported


@dataclass(frozen=True)
class Target:
    """`pipe` is None for a denoiser that runs in the user's own loop."""

    pipe: DiffusionPipeline | None
    denoisers: dict[str, nn.Module]

    @classmethod
    def of_pipeline(cls, pipe: Any) -> "Target":
        if not isinstance(pipe, DiffusionPipeline):
            raise Unsupported(
                f"{type(pipe).__name__} is not a DiffusionPipeline: give the pipeline, or for your own loop "
                "accelerate(pipe.unet, recipe)"
            )
        return cls(pipe, anatomy.denoisers(pipe))

    @property
    def label(self) -> str:
        return type(self.pipe or self.denoiser).__name__

    @property
    def denoiser(self) -> nn.Module:
        """The first, and mostly the only one."""
        return next(iter(self.denoisers.values()))

    @property
    def text_encoders(self) -> dict[str, nn.Module]:
        return anatomy.text_encoders(self.pipe)

    @property
    def decoders(self) -> dict[str, nn.Module]:
        return anatomy.decoders(self.pipe)

    def need_pipeline(self, technique: str) -> DiffusionPipeline:
        """The pipeline, for techniques that work outside the denoiser."""
        if self.pipe is None:
            raise Unsupported(f"{technique} works on a pipeline, not on a denoiser alone: use AcceleratedPipeline")
        return self.pipe
