"""Whether a scheduler takes what a pipeline's code hands to it.

Read from the code, since what a pipeline passes is written nowhere else and a table of 140 pipelines would age.
"""

import functools
import inspect
import re
from typing import Any

from .errors import Unsupported


def refuse_misfit(pipeline: type, made: Any, name: str) -> None:
    """Raises `Unsupported` if a call of `pipeline` with `made`, known to the user as `name`, would fail or be wrong."""
    call, whole = source_of(pipeline.__call__), source_of(pipeline)
    refuse_missing(pipeline, made, name, call, whole)
    refuse_mu(pipeline, made, name, call)
    if type(made).__name__.startswith("UniPC") and re.search(r"^\s+sigmas = (?!None\b|np\.)", call, re.MULTILINE):
        raise Unsupported(f"{pipeline.__name__} passes sigmas as a list, on which {name} fails: use flow_euler")
    scaled = float(getattr(made, "init_noise_sigma", 1)) > 1.001
    if scaled and not ("scale_model_input" in whole and re.search("init_noise_sigma|add_noise", whole)):
        raise Unsupported(f"{pipeline.__name__} does not scale latents by sigma, as {name} needs: use ddim or dpmpp_2m")


def refuse_missing(pipeline: type, made: Any, name: str, call: str, whole: str) -> None:
    """Methods and keywords that the code uses without asking whether they are there."""
    guarded = set(re.findall(r"hasattr\(self\.scheduler, \"(\w+)\"", whole))
    for method in set(re.findall(r"\bself\.scheduler\.(\w+)\(", whole)) - guarded:
        if not hasattr(made, method):
            raise Unsupported(
                f"{pipeline.__name__} calls {method}, which {name} lacks: use flow_euler or its own scheduler"
            )
    for method, words in (("step", step_words(call)), ("set_timesteps", schedule_words(call, made))):
        if missing := words - set(inspect.signature(getattr(made, method)).parameters):
            words = ", ".join(sorted(missing))
            raise Unsupported(
                f"{pipeline.__name__} passes {words} to {method}, which {name} does not take: use another"
            )


def step_words(call: str) -> set[str]:
    """Keywords of `scheduler.step(...)`; those that the pipeline reads off the signature come as `**kwargs`."""
    steps = re.findall(r"\bself\.scheduler\.step\(([^()]*(?:\([^()]*\)[^()]*)*)\)", call)
    return {word for step in steps for word in re.findall(r"(\w+)=", step)}


def schedule_words(call: str, made: Any) -> set[str]:
    """What it hands to `set_timesteps` beside the number of steps, whatever the user asks for."""
    own_grid = made.config.get("use_flow_sigmas", False) and "use_flow_sigmas" in call
    sigmas = re.search(r"^\s+sigmas = (?!None\b)", call, re.MULTILINE) and not own_grid
    mu = passes_mu(call) or (made.config.get("use_dynamic_shifting") and '"mu"' in call)
    return ({"sigmas"} if sigmas else set()) | ({"mu"} if mu else set())


def passes_mu(call: str) -> bool:
    return re.search(r"\bmu=mu\b|\{\"mu\": mu", call) is not None


def refuse_mu(pipeline: type, made: Any, name: str, call: str) -> None:
    shifts, strict = made.config.get("use_dynamic_shifting"), type(made).__name__.startswith(("DPMSolver", "DEIS"))
    if strict and passes_mu(call) and not shifts:
        raise Unsupported(f"{pipeline.__name__} passes mu to a fixed shift, which {name} refuses: use flow_euler")


@functools.cache
def source_of(function: Any) -> str:
    """Source text, empty where there is none: diffusers' own error at the call has to do then."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
