"""CompileBlocks: torch.compile on the largest parts of the denoiser that no other technique has a hand in.

What: a UNet is compiled whole, a transformer block by block (equal blocks share one graph), and so is the decoder's
    network with `decoder=True`. Where a technique wraps something inside (a cache on a block), the largest parts free of wrappers are
    compiled instead: decisions stay outside, computation inside.
Pays when: kernels are small and Python is slow beside them: low resolution, small batches, GPUs; many calls.
Hurts when: few calls: the first one waits for the compiler; every new size compiles again until sizes are dynamic.
Exact?: to rounding: fused operations keep intermediate values in registers.
Settings: `backend` of torch.compile; `decoder`, off because one decode a call rarely earns its compile time.
Source: docs.pytorch.org/tutorials/recipes/regional_compilation.html.
Measured: MEASURED
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import Unsupported
from ..technique import Claim, Fidelity, Stage, Technique
from .offload import refuse_offloaded

if TYPE_CHECKING:
    from ..patches import Patches
    from ..target import Target

GRAPHS = 64  # of one class of blocks, over shapes and widths; torch's own limit of 8 falls back to eager in silence


@dataclass(frozen=True, kw_only=True)
class CompileBlocks(Technique):
    """Compiled denoiser. The first call of every new shape compiles; `report.recompiles` counts the graphs."""

    name = "compile_blocks"
    stage = Stage.COMPILE
    fidelity = Fidelity.ROUNDING
    claims = frozenset({Claim("compilation")})

    backend: str = "inductor"
    decoder: bool = False

    def check(self, target: "Target") -> None:
        refuse_offloaded(type(self).__name__, target.denoisers.values())
        if self.backend not in torch._dynamo.list_backends(exclude_tags=()):
            known = ", ".join(torch._dynamo.list_backends())
            raise Unsupported(f"torch.compile has no backend {self.backend!r}; it has: {known}")
        if self.backend == "inductor" and any(m.device.type == "cpu" for m in first_parameters(target)):
            need_compiler()

    def apply(self, target: "Target", patches: "Patches") -> None:
        """Regions are chosen when every technique has been applied: caches are, after this one."""
        patches.on_ready(functools.partial(self.compile, target, patches))

    def compile(self, target: "Target", patches: "Patches") -> None:
        compiler = Compiler(self.backend)
        roots = [part for module in target.denoisers.values() for part in repeated(module) or [module]]
        if self.decoder:
            roots += [vae.decoder for vae in target.decoders.values() if isinstance(getattr(vae, "decoder", None), nn.Module)]
        for region in [region for root in roots for region in regions(root, patches)]:
            patches.replace_forward(region, functools.partial(call, region, compiler.function(type(region))))

    def identity(self) -> "CompileBlocks":
        return self
