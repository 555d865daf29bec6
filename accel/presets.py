"""Recipes by name, resolved for one pipeline on its device: what cannot work there is left out.

exact     the same pictures to rounding
precise   adds bfloat16 where the machine computes in it
balanced  adds a second-order solver and fewer steps
fast      fewer still
"""

from typing import Any

from .cache.cross_attention import CrossAttentionCache
from .cache.text import TextCache
from .errors import Unsupported
from .kernels.compile import CompileBlocks
from .kernels.memory_format import ChannelsLast
from .kernels.precision import Bfloat16
from .recipe import Recipe
from .solver import SwapScheduler
from .target import Target
from .technique import Technique

# A cache inside the blocks cuts what CompileBlocks can take whole (1.15 instead of 1.39 on emoji-unet), so it stands in
# where there is no compiler only.
EXACT: tuple[Technique, ...] = (TextCache(), ChannelsLast(), CompileBlocks())
WITHOUT_COMPILER: tuple[Technique, ...] = (CrossAttentionCache(),)
PRECISE = (*EXACT, Bfloat16())
SOLVER = (SwapScheduler("dpmpp_2m"),)

PRESETS: dict[str, tuple[tuple[Technique, ...], dict[str, int]]] = {
    "exact": (EXACT, {}),
    "precise": (PRECISE, {}),
    "balanced": ((*PRECISE, *SOLVER), {"num_inference_steps": 20}),
    "fast": ((*PRECISE, *SOLVER), {"num_inference_steps": 10}),
}


def preset(name: str, target: Target) -> Recipe:
    """The recipe of that name for `target`."""
    techniques, defaults = PRESETS[name]
    kept = [t for t in techniques if works(t, target)]
    if not any(isinstance(t, CompileBlocks) for t in kept):
        kept += [t for t in WITHOUT_COMPILER if works(t, target)]
    return Recipe(*kept, **defaults)


def works(technique: Technique, target: Target) -> bool:
    """Whether it can run there. A flow keeps its own solver: second order was measured on models with betas only."""
    if isinstance(technique, SwapScheduler) and is_flow(getattr(target.pipe, "scheduler", None)):
        return False
    try:
        technique.check(target)
    except Unsupported:
        return False
    return True


def is_flow(scheduler: Any) -> bool:
    return not hasattr(scheduler, "alphas_cumprod") or bool(getattr(scheduler.config, "use_flow_sigmas", False))
