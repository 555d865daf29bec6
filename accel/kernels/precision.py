"""Bfloat16: the denoiser computes in bfloat16; everything around it stays as it was.

What: parameters and buffers of the denoisers become bfloat16. Hooks at their boundary cast what goes in and give back
    float32: latents, scheduler and guidance stay float32, and so do timesteps, position ids and rotary tables. What
    diffusers keeps in float32 stays (norms and time embedding of Wan; the report names it). Text encoders and decoders
    stay too: they run once a call, and a decoder's rounding is seen in the picture.
Pays when: matrix products dominate, on hardware that has bfloat16; half the memory of the denoiser everywhere.
Hurts when: the hardware emulates it (refused), or a picture hangs on the last bits.
Exact?: no: 8 bits of mantissa. On 21 families of tiny pipelines and random weights the pictures are within
    46-62 dB of float32's (peak to peak), 50 dB or more but for CogVideoX (46) and DDPM, which draws noise in it (48).
Settings: none. A decoder in bfloat16 was tried: 1-12 dB less, and no faster.
Source: Kalamkar et al. 2019, arXiv:1905.12322.
Measured: UNet of 96-160 channels, 8x8 latents, guided batch 2, 25 steps and the decoder, one thread of a Zen 5 CPU
    (AVX-512 BF16), medians of 12 interleaved calls, CPU time of the whole call: 1.17x at 56 dB; with ChannelsLast and
    CompileBlocks 1.60x at 59 dB, where those two alone give 1.34x.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import Unsupported
from ..run import open_run
from ..technique import Claim, Fidelity, Stage, Technique
from .offload import refuse_offloaded

if TYPE_CHECKING:
    from ..patches import Patches
    from ..target import Target

# Arguments that bfloat16 would spoil: it holds no integer beyond 256 exactly, so neither positions nor timesteps.
KEPT_ARGUMENTS = frozenset({"timestep", "timesteps", "t", "sigma", "guidance"}) | frozenset(
    {"img_ids", "txt_ids", "time_ids", "image_rotary_emb", "freqs_cis"}
)


@dataclass(frozen=True, kw_only=True)
class Bfloat16(Technique):
    """bfloat16 inside the denoiser. Raises `Unsupported` on hardware without it, and for a model in 16 bits already."""

    name = "bfloat16"
    stage = Stage.CAST
    fidelity = Fidelity.PRECISION
    claims = frozenset({Claim("dtype")})

    def check(self, target: "Target") -> None:
        refuse_offloaded(type(self).__name__, target.denoisers.values())
        for module in target.denoisers.values():
            if next(castable(module), None) is None:
                dtype = next(module.parameters()).dtype
                raise Unsupported(f"Bfloat16 has nothing to do: {type(module).__name__} is in {dtype} already")
            need_hardware(next(module.parameters()).device)

    def apply(self, target: "Target", patches: "Patches") -> None:
        for module in target.denoisers.values():
            for tensor in castable(module):
                patches.set_data(tensor, tensor.data.to(torch.bfloat16), self.name)
            names = tuple(signature(type(module).forward).parameters)[1:]
            # Hooks, which act outside a Run too: the weights are bfloat16 for the user's own calls as well.
            into = partial(cast_arguments, names)
            patches.on_undo(module.register_forward_pre_hook(into, with_kwargs=True, prepend=True).remove)
            patches.on_undo(module.register_forward_hook(cast_output).remove)
            if kept := sorted(kept_in_float32(module)):
                patches.wrap_forward(module, noting(f"{type(module).__name__} keeps in float32: {', '.join(kept)}"))

    def identity(self) -> None:
        return None


def castable(module: nn.Module) -> Iterator[Tensor]:
    """The float32 parameters and buffers, less those whose path holds a name that the class keeps in float32."""
    kept = kept_in_float32(module)
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype == torch.float32 and not kept & set(path.split(".")):
            yield tensor


def kept_in_float32(module: nn.Module) -> set[str]:
    return set(getattr(module, "_keep_in_fp32_modules", None) or ())


def noting(text: str) -> Callable[..., Any]:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        open_run().report.note(text)
        return inner(*args, **kwargs)

    return around


def cast_arguments(names: tuple[str, ...], module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    named = [*zip(names, args, strict=False)]
    lowered = tuple(lower(name, value) for name, value in named) + args[len(named) :]
    return lowered, {name: lower(name, value) for name, value in kwargs.items()}


def lower(name: str, value: Any) -> Any:
    return value if name in KEPT_ARGUMENTS else cast(value, torch.float32, torch.bfloat16, name)


def cast_output(module: nn.Module, args: Any, output: Any) -> Any:
    return cast(output, torch.bfloat16, torch.float32)


def cast(value: Any, old: torch.dtype, new: torch.dtype, name: str = "") -> Any:
    """`value` with its tensors of dtype `old` in `new`, through lists, tuples and dicts (a model's output is one)."""
    if isinstance(value, Tensor):
        return value.to(new) if value.dtype == old else value
    if isinstance(value, Mapping):
        return type(value)(**{k: v if k in KEPT_ARGUMENTS else cast(v, old, new) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(cast(v, old, new) for v in value)
    return value


# ---------------------------------------------------------------------------------------------------- hardware


def need_hardware(device: torch.device) -> None:
    if not HARDWARE.get(device.type, lambda: True)():
        raise Unsupported(
            f"Bfloat16 is emulated on this {device.type} and would be slower than float32: leave it out of the recipe"
        )


def cpu_has_bfloat16() -> bool:
    """AVX-512 BF16 or AMX; others than x86 are asked through oneDNN."""
    if platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


HARDWARE: dict[str, Callable[[], bool]] = {
    "cpu": cpu_has_bfloat16,
    "cuda": lambda: torch.cuda.is_bf16_supported(including_emulation=False),
}
