"""A pipeline as a command line asks for it: by name, on a device, in a precision."""

from typing import Annotated, Any

import typer

from .errors import InvalidConfig

DTYPES = ("float32", "bfloat16", "float16")
Model = Annotated[str, typer.Argument(help="emoji-unet, emoji-dit, a pipeline folder, or a hub id")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, mps; the best that there is if not given")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16")]


def need_place(device: str | None, dtype: str) -> None:
    """Raises `InvalidConfig` for no precision, or no device, of torch."""
    import torch

    if dtype not in DTYPES:
        raise InvalidConfig(f"--dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    try:
        torch.device(device or "cpu")
    except RuntimeError:
        raise InvalidConfig(f"--device {device!r} is no device of torch: cpu, cuda, cuda:1, mps, xpu") from None


def loaded(model: str, device: str | None, dtype: str) -> Any:
    """The pipeline on the best device, or the one that is asked for."""
    import torch

    from .doctor import best_device
    from .zoo import embedded

    need_place(device, dtype)
    return embedded.load(model, dtype=getattr(torch, dtype)).to(device or best_device())
