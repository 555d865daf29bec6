"""SwapScheduler: another solver for the pipeline's steps.

*What* calls sample with another of diffusers' schedulers; the pipeline and its saved folder keep their own.
*Pays when* a second-order solver (dpmpp_2m, unipc) comes in fewer steps as close as DDIM or Euler does in many.
*Hurts when* the model is a few-step student (LCM, turbo), trained for its own scheduler. heun and kdpm2 evaluate the
denoiser twice a step. deis stops at the model's smallest noise level, about 3 % of noise, and is less exact than
flow_euler on a flow. ddim at a number of steps that does not divide the training steps goes to slightly other levels
than its next call is for; euler is the same solver without this.
*Exact?* no: another path from the same noise. Swapping to the class that the pipeline has changes nothing.
*Settings* `scheduler`: a name of the table or a diffusers class; `options`: fields of its constructor, over those that
are carried from the old scheduler by meaning (conversion.py). The number of steps stands in the recipe:
`Recipe(SwapScheduler("unipc"), num_inference_steps=10)`.
*Source* DDIM arXiv:2010.02502, Heun arXiv:2206.00364, DPM-Solver++ arXiv:2211.01095, UniPC arXiv:2302.04867, DEIS
arXiv:2204.13902, zero terminal SNR arXiv:2305.08891.
*Measured* root mean square distance to the exact solution for Gaussian data (spread 0.85), v-prediction from pure
noise, 10 steps: euler 0.124, dpmpp_2m 0.083, unipc 0.078, deis 0.075, heun 0.071 with 19 evaluations; euler needs 20
steps for 0.072. On pictures: not measured here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import diffusers
from diffusers.schedulers import SchedulerMixin

from .conversion import NEUTRAL, converted, facts_of, fields
from .errors import InvalidRecipe, MissingExtra, Unsupported
from .pipeline_code import refuse_misfit
from .pure_noise import in_float32
from .technique import Claim, Fidelity, Stage, Technique

if TYPE_CHECKING:
    from .patches import Patches
    from .target import Target

_DPMPP = {"algorithm_type": "dpmsolver++", "solver_order": 2}
_FLOW = {"use_flow_sigmas": True}
SOLVERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "kdpm2_ancestral": ("KDPM2AncestralDiscreteScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", _DPMPP),
    "dpmpp_3m": ("DPMSolverMultistepScheduler", _DPMPP | {"solver_order": 3}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", _DPMPP | {"algorithm_type": "sde-dpmsolver++"}),
    "dpmpp_2s": ("DPMSolverSinglestepScheduler", _DPMPP | {"lower_order_final": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "sasolver": ("SASolverScheduler", {}),
    "lcm": ("LCMScheduler", {}),
    "tcd": ("TCDScheduler", {}),
    "flow_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "flow_heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "flow_lcm": ("FlowMatchLCMScheduler", {}),
    "flow_dpmpp_2m": ("DPMSolverMultistepScheduler", _DPMPP | _FLOW),
    "flow_unipc": ("UniPCMultistepScheduler", _FLOW),
    "flow_deis": ("DEISMultistepScheduler", _FLOW),
}


class Options(dict[str, Any]):
    """A mapping that does not change, so that it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True))

    def _fixed(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the options of a technique do not change: make another technique")

    __setitem__: Any = _fixed
    update: Any = _fixed
    __delitem__ = __ior__ = pop = popitem = clear = _fixed
    setdefault: Any = _fixed


@dataclass(frozen=True, kw_only=True)
class SwapScheduler(Technique):
    """`SwapScheduler("dpmpp_2m")`, `SwapScheduler("unipc", options={"solver_order": 3})`.

    `scheduler`: a name of `SOLVERS` or a diffusers class. `options`: fields of its constructor, over what is carried
    from the pipeline's own scheduler. Raises `InvalidRecipe` for an unknown name or option, listing the known ones.
    """

    scheduler: str = field(kw_only=False)
    options: Mapping[str, Any] = Options()

    name: ClassVar[str] = "swap_scheduler"
    stage: ClassVar[Stage] = Stage.SOLVER
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("scheduler", "pipeline")})

    def __post_init__(self) -> None:
        try:
            options = Options(json.loads(json.dumps(self.options)))
        except (TypeError, ValueError) as error:
            raise InvalidRecipe(f"options of {self.scheduler} must be plain JSON values by name: {error}") from None
        own = fields(scheduler_class(self.scheduler))
        unknown = [k for k, v in options.items() if k not in own and (k not in NEUTRAL or v != NEUTRAL[k])]
        if unknown:
            raise InvalidRecipe(f"{self.scheduler} has no {', '.join(unknown)}; known: {', '.join(sorted(own))}")
        object.__setattr__(self, "options", options)

    def convert(self, source: Any) -> Any:
        """What calls use in place of `source`. Raises `Unsupported` if it cannot express what `source` does."""
        forced = SOLVERS[self.scheduler][1] if self.scheduler in SOLVERS else {}
        return converted(source, scheduler_class(self.scheduler), {**forced, **self.options})

    def check(self, target: "Target") -> None:
        pipe = target.need_pipeline(type(self).__name__)
        source = getattr(pipe, "scheduler", None)
        if not isinstance(source, SchedulerMixin):
            raise Unsupported(f"{target.label} has no diffusers scheduler to swap: leave {self} out")
        made = self.convert(source)
        if made is not source:
            refuse_misfit(type(pipe), made, self.scheduler)

    def apply(self, target: "Target", patches: "Patches") -> None:
        patches.replace_component("scheduler", remembering(self.convert))
        patches.wrap_step(in_float32)

    def identity(self) -> None:
        """None: which scheduler the pipeline has is not known here."""
        return None

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        return {"scheduler": ("ddim", "euler", "heun", "dpmpp_2m", "unipc", "deis")}


def scheduler_class(name: str) -> type:
    if not isinstance(name, str):
        raise InvalidRecipe(f"SwapScheduler takes a name, not {name!r}; known: {', '.join(SOLVERS)}")
    class_name = SOLVERS[name][0] if name in SOLVERS else name
    try:
        found = getattr(diffusers, class_name, None)
        if isinstance(found, type) and hasattr(found, "set_timesteps") and hasattr(found, "step"):
            return found
    except ImportError as error:  # a stand-in for a class whose dependency is missing
        raise MissingExtra(f"{name} cannot be used here: {' '.join(str(error).split())}") from None
    raise InvalidRecipe(f"unknown scheduler {name!r}; known: {', '.join(SOLVERS)}, and diffusers' scheduler classes")


def remembering(convert: Any) -> Any:
    """`convert`, once for each scheduler and state of its config: calls come from many threads."""
    lock, last = Lock(), [None, "", None]

    def make(source: Any) -> Any:
        state = repr((facts_of(source), source.config))
        with lock:
            if last[0] is not source or last[1] != state:
                last[:] = source, state, convert(source)
            return last[2]

    return make
