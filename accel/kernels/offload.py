"""Weights that accelerate keeps elsewhere and brings in leaf by leaf (`enable_sequential_cpu_offload`)."""

from collections.abc import Iterable

from torch import nn

from ..errors import Unsupported


def offloaded_inside(module: nn.Module) -> bool:
    """Whether a hook sits on a module inside this one. One on the module itself moves it whole, before its forward."""
    return any("_hf_hook" in vars(part) for part in module.modules() if part is not module)


def refuse_offloaded(technique: str, modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if offloaded_inside(module) or any(parameter.is_meta for parameter in module.parameters()):
            raise Unsupported(
                f"{technique} needs the weights of {type(module).__name__}, which sequential offload keeps elsewhere: "
                "use enable_model_cpu_offload instead"
            )
