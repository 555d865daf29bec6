"""Makes diffusers pipelines generate faster, and measures what the speed cost."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fewstep.accel.denoiser import accelerate, release, run
    from fewstep.accel.errors import Unsupported
    from fewstep.accel.pipeline import AcceleratedPipeline
    from fewstep.accel.recipe import Recipe

__version__ = version("fewstep")
__all__ = ["AcceleratedPipeline", "Recipe", "Unsupported", "__version__", "accelerate", "release", "run"]

_HOMES = {
    "AcceleratedPipeline": "pipeline",
    "Recipe": "recipe",
    "Unsupported": "errors",
    "accelerate": "denoiser",
    "release": "denoiser",
    "run": "denoiser",
}


def __getattr__(name: str) -> Any:
    """Imported when first used: `fewstep --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fewstep' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".accel.{_HOMES[name]}", __name__), name)
