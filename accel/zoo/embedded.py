"""The models that the package carries, and how they and others are loaded."""

from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch import nn

from ..errors import InvalidConfig

HERE = Path(__file__).parent
EMBEDDED = ("emoji-unet", "emoji-dit")


def folder(name: str) -> Path:
    """Where an embedded model lies, as a stock diffusers folder."""
    if name not in EMBEDDED:
        raise InvalidConfig(f"no embedded model {name!r}; known: {', '.join(EMBEDDED)}")
    return HERE / name


def load(model: str | Path, **kwargs: Any) -> Any:
    """A pipeline by the name of an embedded model, a folder, or a hub id; `kwargs` as diffusers takes them.

    Raises `InvalidConfig` for a path that is no pipeline folder.
    """
    path = folder(str(model)) if str(model) in EMBEDDED else model
    if Path(path).exists() and not (Path(path) / "model_index.json").exists():
        raise InvalidConfig(f"{path} holds no model_index.json: give the folder that save_pretrained wrote")
    try:
        pipe = DiffusionPipeline.from_pretrained(path, **kwargs)
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"{model!r} is neither an embedded model ({', '.join(EMBEDDED)}), a folder, nor a hub id that "
            f"can be reached: {error}"
        ) from error
    return aligned(pipe)


def aligned(pipe: Any) -> Any:
    """Moves weights that were read at an odd address to an aligned one.

    Weights mapped from a safetensors file start where the file's header ends, and kernels add up in another order
    there: the loaded pipeline's images differ from the saved one's in the last bits (seen at 3e-6).
    """
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            align(part)
    return pipe


@torch.no_grad()
def align(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)
