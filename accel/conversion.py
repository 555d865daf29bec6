"""One diffusers scheduler made into another for the same model.

`X.from_config(y.config)` gives every field that `y` lacks X's own default: a Euler pipeline turned into DDIM starts to
clip, DDIM's leading steps become linspace, UniPC's flow shift becomes betas. Here a field that describes the model is
carried over or refused, a field that describes sampling keeps the value that it has in effect, and a class that has
no such field counts as not doing it. How strongly the schedule reaches pure noise is compared number by number.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr
from torch import Tensor

from .errors import Unsupported
from .pure_noise import FLOOR, from_pure_noise

# What a scheduler's model is: noise levels by step (betas), a flow, or both kinds, told apart by `use_flow_sigmas`.
_KINDS = (
    ("discrete", "DDIM DDIMParallel DDPM DDPMParallel PNDM LCM TCD EulerDiscrete EulerAncestralDiscrete"),
    ("discrete", "HeunDiscrete LMSDiscrete KDPM2Discrete KDPM2AncestralDiscrete"),
    ("discrete flow", "DPMSolverMultistep DPMSolverSinglestep UniPCMultistep DEISMultistep SASolver"),
    ("flow", "FlowMatchEulerDiscrete FlowMatchHeunDiscrete FlowMatchLCM"),
    ("cogvideox", "CogVideoXDDIM CogVideoXDPM"),  # a step of their own, but the betas of any other
    ("edm", "EDMEuler EDMDPMSolverMultistep"),
)
KINDS = {f"{name}Scheduler": frozenset(kinds.split()) for kinds, names in _KINDS for name in names.split()}
INSTEAD = {
    "discrete": "ddim, euler, heun, dpmpp_2m, unipc or deis",
    "flow": "flow_euler, flow_heun, flow_lcm, dpmpp_2m or unipc",
    "cogvideox": "CogVideoXDDIMScheduler, CogVideoXDPMScheduler, euler, dpmpp_2m or unipc",
    "edm": "EDMEulerScheduler or EDMDPMSolverMultistepScheduler",
}

# Fields that must not be lost, with the value that a class without the field acts by.
_GRID = {"use_karras_sigmas": False, "use_exponential_sigmas": False, "use_beta_sigmas": False}
_DISCRETE = {
    "timestep_type": "discrete",
    "clip_sample": False,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "interpolation_type": "linear",
    "use_lu_lambdas": False,
    **_GRID,
}
_FLOW = {
    "thresholding": False,
    "use_dynamic_shifting": False,
    "time_shift_type": "exponential",
    "shift_terminal": None,
    "invert_sigmas": False,
    "stochastic_sampling": False,
    **_GRID,
}
KEPT = {"discrete": _DISCRETE, "cogvideox": _DISCRETE, "flow": _FLOW, "edm": {"thresholding": False}}
NEUTRAL = _DISCRETE | _FLOW  # one of these may be an option of any class: "I know that it is lost"

# Fields that say what the noise levels are; they are compared as numbers.
LEVELS = ("beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr", "snr_shift_scale")
# Fields that are carried where the new class has them and mean nothing where it does not.
CARRIED = (
    *("num_train_timesteps", "prediction_type", "variance_type"),
    *("steps_offset", "set_alpha_to_one", "final_sigmas_type", "clip_sample_range", "sample_max_value"),
    *("dynamic_thresholding_ratio", "lambda_min_clipped", "skip_prk_steps"),
    *("original_inference_steps", "timestep_scaling", "sigma_min", "sigma_max", "sigma_data", "sigma_schedule", "rho"),
    *("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
)
# Fields that a class takes and does not read.
IGNORED = {
    "TCDScheduler": {"clip_sample", "thresholding", "set_alpha_to_one"},
    "CogVideoXDDIMScheduler": {"clip_sample"},
    "CogVideoXDPMScheduler": {"clip_sample"},
}
NO_SAMPLE_PREDICTION = ("EulerAncestralDiscrete", "KDPM2", "PNDM")
LEARNED = ("learned", "learned_range")
# Settings that give NaN or another grid than they say: class, settings, what goes wrong, what to use.
FAULTS = (
    ("UniPC", {"predict_x0": False, "final_sigmas_type": "zero"}, "gives NaN", "final_sigmas_type='sigma_min'"),
    ("UniPC", {"solver_type": "bh1", "final_sigmas_type": "zero"}, "gives NaN", "solver_type='bh2'"),
    ("DPMSolverMultistep", {"algorithm_type": "sde-dpmsolver", "solver_order": 3}, "fails at step 3", "solver_order=2"),
    *(
        (name, {"use_flow_sigmas": True, field: True}, "leaves the flow's noise levels", "flow_euler")
        for name in ("DPMSolver", "DEIS", "SASolver")
        for field in _GRID
    ),
    *(
        (name, {"use_dynamic_shifting": True, "time_shift_type": "linear"}, "is not written", "unipc or flow_euler")
        for name in ("DPMSolver", "DEIS")
    ),
)


def converted(source: Any, cls: type, options: Mapping[str, Any]) -> Any:
    """`source` itself where it is `cls` with these options already, otherwise a new `cls` for the same model.

    Raises `Unsupported` for what `cls` cannot express, naming what to use instead.
    """
    facts = facts_of(source)
    if type(source) is cls and all(facts.get(name) == value for name, value in options.items()):
        return source
    kind = common_kind(source, cls, facts, options)
    refuse_losses(cls, kind, {**facts, **options}, source)
    made = build(source, cls, kind, facts, options)
    refuse_faults(made)
    return with_unread(made, source)


@cache
def fields(cls: type) -> frozenset[str]:
    """The constructor's fields, less those that it does not read."""
    return frozenset(inspect.signature(cls.__init__).parameters) - {"self", "kwargs"} - IGNORED.get(cls.__name__, set())


def facts_of(source: Any) -> dict[str, Any]:
    """What `source` does, by field: its own fields, and of a checkpoint's other fields those that were stated.

    What it has no field for and must not be lost is not done, whatever the checkpoint says.
    """
    own, defaulted = fields(type(source)), source.config.get("_use_default_values", ())
    stated = {k: v for k, v in source.config.items() if not k.startswith("_") and (k in own or k not in defaulted)}
    facts = {k: v for k, v in stated.items() if k in own or k not in NEUTRAL or k == "timestep_spacing"}
    if hasattr(source, "set_shift"):
        facts["shift"] = source.shift  # set_shift() moves it without a word to the config
    if "shift" in facts or "flow_shift" in facts:
        facts["shift"] = facts["flow_shift"] = facts["shift"] if "shift" in own else facts["flow_shift"]
    return facts


def common_kind(source: Any, cls: type, facts: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The kind of model that both are made for."""
    name, target = type(source).__name__, cls.__name__
    kinds, possible = (KINDS.get(n, frozenset({n})) for n in (name, target))
    if "flow" in kinds and "discrete" in kinds:
        kinds = frozenset({"flow" if facts["use_flow_sigmas"] else "discrete"})
    if "use_flow_sigmas" in options:
        possible &= {"flow" if options["use_flow_sigmas"] else "discrete"}
    for kind in kinds & possible or ({"discrete"} & possible if "cogvideox" in kinds else ()):
        return kind
    raise Unsupported(
        f"this pipeline's {name} is made for another kind of model than {target} with {dict(options)}"
        + "".join(f": use {INSTEAD[kind]}" for kind in kinds if kind in INSTEAD)
    )


def refuse_losses(cls: type, kind: str, facts: Mapping[str, Any], source: Any) -> None:
    """Raises `Unsupported` where `cls` would do something else than `facts` say."""
    name, own, before = cls.__name__, fields(cls), type(source).__name__
    for field, neutral in KEPT[kind].items() if kind in KEPT else ():
        if field not in own and facts.get(field, neutral) != neutral:
            raise Unsupported(
                f"{before} has {field}={facts[field]!r}, which {name} cannot do: use another scheduler, or accept the "
                f"difference with options={{{field!r}: {neutral!r}}}"
            )
    if facts.get("prediction_type") == "sample" and name.startswith(NO_SAMPLE_PREDICTION):
        raise Unsupported(f"{name} cannot sample a model that predicts the image: use ddim, euler, dpmpp_2m or unipc")
    if facts.get("variance_type") in LEARNED and "variance_type" not in own:
        raise Unsupported(f"this model predicts its variance too, which {name} cannot take apart: use ddpm or dpmpp_2m")


def build(source: Any, cls: type, kind: str, facts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    own = fields(cls)
    kept = own if type(source) is cls else own & {*CARRIED, *LEVELS, *KEPT.get(kind, ())}
    neutral = {"snr_shift_scale": 1.0, "rescale_betas_zero_snr": False, "skip_prk_steps": True} | KEPT.get(kind, {})
    known = neutral | dict(facts)
    settings = {field: known[field] for field in kept if field in known}
    if not cls.__name__.startswith("DDPM") and settings.get("variance_type") not in LEARNED:
        settings.pop("variance_type", None)
    if kind == "flow":
        flow = {"shift": facts["shift"], "flow_shift": facts["shift"]}
        flow |= {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
        settings |= {field: value for field, value in flow.items() if field in own}
    settings |= {field: value for field, value in options.items() if field in own}
    if kind == "flow":
        return from_pure_noise(construct(cls, settings))
    if not hasattr(source, "alphas_cumprod"):
        return construct(cls, settings)
    levels = None if set(options) & set(LEVELS) else levels_of(source, facts)
    refuse_epsilon_without_signal(settings, levels)
    return with_levels(cls, settings, levels)


def construct(cls: type, settings: Mapping[str, Any]) -> Any:
    try:
        return cls(**settings)
    except (ValueError, AssertionError) as error:
        raise Unsupported(f"{cls.__name__} refuses these settings: {error}") from error


def levels_of(source: Any, facts: Mapping[str, Any]) -> Tensor:
    """The signal's share of the variance at each training step."""
    levels = source.alphas_cumprod.double().cpu()
    if facts.get("rescale_betas_zero_snr") and levels[-1] > FLOOR:  # stated by the checkpoint, not done by the class
        levels = torch.cumprod(1 - rescale_zero_terminal_snr(betas_of(levels)), dim=0)
    return levels


def refuse_epsilon_without_signal(settings: Mapping[str, Any], levels: Tensor | None) -> None:
    none_left = settings.get("rescale_betas_zero_snr") or (levels is not None and levels[-1] == 0)
    if none_left and settings.get("prediction_type") == "epsilon":
        raise Unsupported(
            "a model that starts from pure noise (rescale_betas_zero_snr) cannot be sampled by its noise prediction, "
            "which says nothing there: its scheduler needs prediction_type='v_prediction' or 'sample'"
        )


def betas_of(levels: Tensor) -> Tensor:
    return 1 - torch.cat([levels[:1], levels[1:] / levels[:-1]])


def with_levels(cls: type, settings: dict[str, Any], levels: Tensor | None) -> Any:
    """A `cls` that has these noise levels: by its own fields if they give them, otherwise by a list of betas."""
    made: Any = None
    try:
        made = construct(cls, settings)
    except NotImplementedError as error:  # a beta_schedule that this class does not have
        if levels is None:
            raise Unsupported(f"{cls.__name__} refuses these settings: {error}") from error
    if levels is not None and (made is None or not same(made.alphas_cumprod, levels)):
        betas = betas_of(levels.clamp_min(FLOOR)).tolist()
        named = {"trained_betas": betas, "rescale_betas_zero_snr": False, "snr_shift_scale": 1.0}
        made = construct(cls, settings | {k: v for k, v in named.items() if k in fields(cls)})
    return from_pure_noise(made) if made.alphas_cumprod[-1] < 1.5 * FLOOR else made


def same(levels: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(levels.double().cpu(), wanted, rtol=1e-4, atol=2 * FLOOR)


def refuse_faults(made: Any) -> None:
    name, config = type(made).__name__, made.config
    for prefix, settings, fault, instead in FAULTS:
        if name.startswith(prefix) and all(config.get(k) == v for k, v in settings.items()):
            words = ", ".join(f"{k}={v!r}" for k, v in settings.items())
            raise Unsupported(f"diffusers' {name} with {words} {fault}: use {instead}")


def with_unread(made: Any, source: Any) -> Any:
    """Keeps in the config what the new class does not read: pipelines do, for instance `base_image_seq_len`."""
    unread = {k: v for k, v in source.config.items() if k not in made.config and not k.startswith("_")}
    made.register_to_config(**unread)
    return made
