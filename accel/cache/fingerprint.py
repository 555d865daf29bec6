"""What tells one state of a module's weights from another without reading them all.

Shapes, types and torch's version counters, which every tracked in-place change moves on; the state of each LoRA
layer; and, because fusing a LoRA and loading a textual inversion write through `.data`, which no counter sees, a
sample of the contents: eight values of each tensor, three of each row of an embedding. None of it changes when an
offload hook moves the weights away and back.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES = 8


def fingerprint(module: nn.Module) -> tuple[str, bytes]:
    """Equal for equal states. Missed: a change behind the counter's back that avoids every sampled value."""
    described: list[Any] = []
    samples: dict[Any, list[Tensor]] = defaultdict(list)
    for part in module.modules():
        compiled = getattr(part, "_compiled_call_impl", None) is not None
        described.append((type(part).__qualname__, part.training, compiled, adapter_state(part)))
        for tensor in contents(part):
            described.append((tuple(tensor.shape), tensor.dtype, version(tensor)))
            if tensor.numel() and not tensor.is_meta:
                samples[tensor.device, tensor.dtype].append(sample(part, tensor))
    gathered = b"".join(torch.cat(group).view(torch.uint8).cpu().numpy().tobytes() for group in samples.values())
    return repr(described), gathered


def contents(part: nn.Module) -> Iterator[Tensor]:
    """Its own parameters and buffers; those that sequential offload took away, from where it keeps them."""
    hook = getattr(part, "_hf_hook", None)
    maps = (getattr(h, "weights_map", None) for h in getattr(hook, "hooks", [hook]))
    kept = next((entries for entries in maps if entries is not None), None)
    for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
        if tensor is None:
            continue
        if tensor.is_meta and kept is not None:
            tensor = kept[name]
        yield from plain_tensors(tensor.detach())


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """A quantized tensor's data and scales, any other tensor itself."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for name in flatten()[0]:
        yield from plain_tensors(getattr(tensor, name))


def sample(part: nn.Module, tensor: Tensor) -> Tensor:
    if isinstance(part, nn.Embedding) and tensor.ndim == 2:  # one row may have changed: a token's
        return tensor[:, :: max(1, tensor.shape[1] // 2)].reshape(-1)
    return tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLES)]


def version(tensor: Tensor) -> int | None:
    """torch's count of in-place changes; tensors made in inference mode have none."""
    return None if tensor.is_inference() else tensor._version


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    """Those that may act: peft makes its own, in training mode, in a module that is not."""
    return [part for part in module.modules() if isinstance(part, nn.Dropout) and part.p > 0]


def adapter_state(part: nn.Module) -> tuple[Any, ...]:
    """Which LoRAs of a peft layer act, and how strongly; empty for any other module."""
    if not hasattr(part, "merged_adapters"):
        return ()
    layer: Any = part
    scales = tuple(sorted(layer.scaling.items()))
    return tuple(layer.active_adapters), scales, tuple(layer.merged_adapters), layer.disable_adapters
