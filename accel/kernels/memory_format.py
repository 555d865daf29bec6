"""ChannelsLast: convolution weights in NHWC, the layout that convolution kernels compute in.

What: the weights of the 2-D (and 3-D) convolutions of denoisers and decoders are laid out channels-last. A convolution
    whose weight is NHWC gives NHWC, and normalisation and activations keep it, so no input is converted.
Pays when: the denoiser has convolutions: UNets; most under CompileBlocks, and on GPUs with tensor cores in 16 bits.
Hurts when: small batches of tiny pictures with attention between all convolutions, whose reshapes then copy.
Exact?: to rounding: another kernel sums in another order.
Settings: none.
Source: docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html.
Measured: UNet of 96-160 channels at 8x8 latents, guided batch 2, one thread of a Zen 5 CPU, median of 40 interleaved
    calls, CPU time of one call of it: 1.05-1.08x alone; with CompileBlocks 1.38x where CompileBlocks alone is 1.20x.
    Whole pipeline call of 25 steps: 1.05x alone, 1.34x where CompileBlocks alone is 1.23x.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import Unsupported
from ..technique import Claim, Fidelity, Stage, Technique
from .offload import refuse_offloaded

if TYPE_CHECKING:
    from ..patches import Patches
    from ..target import Target

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True, kw_only=True)
class ChannelsLast(Technique):
    """Convolutions in NHWC. Raises `Unsupported` for a denoiser with no convolution but a patch embedding."""

    name = "channels_last"
    stage = Stage.CAST
    fidelity = Fidelity.ROUNDING
    claims = frozenset({Claim("memory format", "convolutional modules")})

    def check(self, target: "Target") -> None:
        modules = [*target.denoisers.values(), *target.decoders.values()]
        refuse_offloaded(type(self).__name__, modules)
        if not any(convolutional(module) for module in target.denoisers.values()):
            raise Unsupported(
                f"ChannelsLast has nothing to gain: {type(target.denoiser).__name__} has no convolutions but, at most, "
                "its patch embedding; use CompileBlocks"
            )

    def apply(self, target: "Target", patches: "Patches") -> None:
        for module in (*target.denoisers.values(), *target.decoders.values()):
            for weight in weights(module):
                patches.set_strides(weight, weight.data.contiguous(memory_format=FORMATS[weight.ndim]))

    def identity(self) -> "ChannelsLast":
        return self


def weights(module: nn.Module) -> Iterator[Tensor]:
    """Weights of 2-D and 3-D convolutions whose layout matters."""
    for part in module.modules():
        if isinstance(part, nn.modules.conv._ConvNd) and part.weight.ndim in FORMATS:
            yield part.weight


def convolutional(module: nn.Module) -> bool:
    """Has convolutions that see their neighbours one by one, unlike a patch embedding, whose stride is its kernel."""
    found = [m for m in module.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    return any(max(m.kernel_size) > 1 and m.kernel_size != m.stride and m.weight.ndim in FORMATS for m in found)
