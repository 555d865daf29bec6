"""Techniques for a denoiser that runs in the user's own loop: ComfyUI, k-diffusion, a training script's sampler."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from .attachment import Attachment
from .errors import Unsupported
from .patches import Dispatcher, bottom
from .recipe import Recipe
from .run import Run, entered
from .scheduling import stepping
from .target import Target

M = TypeVar("M", bound=nn.Module)


def accelerate(denoiser: M, recipe: Recipe) -> M:
    """The same module, with `recipe` on it. Its techniques act inside `with run(scheduler):`; outside, it runs plain.

    Raises `Unsupported` for techniques that work on a pipeline (text encoding, the scheduler).
    """
    if not isinstance(denoiser, nn.Module):
        raise Unsupported(f"{type(denoiser).__name__} is not a module: give the UNet or transformer itself")
    if attached(denoiser):
        raise Unsupported("this denoiser is accelerated already: release(denoiser) first")
    Attachment(Target(None, {"denoiser": denoiser}), recipe)
    return denoiser


def release(denoiser: M) -> M:
    """Takes the recipe of `accelerate` off."""
    found = attached(denoiser)
    if found is None:
        raise Unsupported("this denoiser is not accelerated")
    found.detach()
    return denoiser


def attached(denoiser: nn.Module) -> Attachment | None:
    """What `accelerate` put on it. Kept by the module alone, so that both are freed together."""
    standing = bottom(denoiser, "forward").value
    return standing.loose if isinstance(standing, Dispatcher) else None


@contextmanager
def run(scheduler: Any = None, rows: Sequence[str] | None = None) -> Generator[Run]:
    """One pass of the user's own loop. `rows`: the guidance branch of each row of the batch, for instance
    `["uncond", "cond"]`; without it every row is taken for the prompt's.

    Steps are counted at `scheduler.step`; without a scheduler, call `advance()` on what this gives after each step.
    """
    state = Run(None, scheduler)
    if scheduler is not None:
        state.slot("schedulers", list).append(scheduler)
    state.slot("branches", lambda: rows)
    plain = type(scheduler)
    if scheduler is not None:
        scheduler.__class__ = stepping(plain)  # the loop calls this object, so it cannot be a copy
    try:
        with entered(state):
            yield state
    finally:
        state.forget()
        if scheduler is not None:
            scheduler.__class__ = plain
