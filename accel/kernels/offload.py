"""Hooks inside a model that move or cast its weights leaf by leaf: sequential and group offload, layerwise casting."""

from collections.abc import Iterable

from torch import nn

from ..errors import Unsupported


def hooked_inside(module: nn.Module) -> bool:
    """Whether a hook sits on a module inside this one. One on the module itself moves it whole, before its forward."""
    return any(hooked(part) for part in module.modules() if part is not module)


def hooked(module: nn.Module) -> bool:
    registry = vars(module).get("_diffusers_hook")
    return "_hf_hook" in vars(module) or bool(registry is not None and registry.hooks)


def refuse_offloaded(technique: str, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if hooked_inside(module) or any(parameter.is_meta for parameter in module.parameters()):
            raise Unsupported(
                f"{technique} cannot reach the weights of {type(module).__name__}, which hooks inside it move or cast: "
                "use enable_model_cpu_offload instead of sequential or group offload"
            )
