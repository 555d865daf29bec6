"""CompileBlocks: torch.compile on the largest parts of the denoiser that no other technique has a hand in.

What: a UNet is compiled whole, a transformer block by block: equal blocks share graphs. Where a technique wraps
    something inside (a cache on a block), the largest parts free of wrappers are compiled instead: decisions stay
    outside, computation inside.
Pays when: kernels are small and Python is slow beside them: low resolution, small batches, GPUs; many calls.
Hurts when: few calls, for the first one waits for the compiler, and so does the first of another size (sizes are
    dynamic from the second on); many small regions, each of which has its guards checked at every call.
Exact?: to rounding: fused operations keep intermediate values in registers.
Settings: `backend` of torch.compile.
Source: docs.pytorch.org/tutorials/recipes/regional_compilation.html.
Measured: UNet of 96-160 channels (cross-attention in both), 8x8 latents, guided batch 2, 25 steps and the decoder, one
    thread of a Zen 5 CPU, medians of 12 interleaved calls, CPU time of the whole call. Alone 1.23x; with ChannelsLast
    1.34-1.39x (relative error of the picture 7e-7); with Bfloat16 too 1.60x (59 dB). With ChannelsLast, but cut in
    its 5 blocks 1.15x, cut in its resnets and transformer blocks 0.90x. The first call takes 31 s of a shared core, or
    4 s of CPU time once the graphs are in torch's cache on disk. Compiling the decoder (1.00x), freezing (1.00x) and
    the C++ wrapper (0.99x) gained nothing and are left out.
"""

import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import Unsupported
from ..run import current_run, open_run
from ..technique import Claim, Fidelity, Stage, Technique
from .offload import hooked_inside, refuse_offloaded

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

    def check(self, target: "Target") -> None:
        refuse_offloaded(type(self).__name__, target.denoisers.values())
        known = torch._dynamo.list_backends(exclude_tags=())
        if self.backend not in known:
            raise Unsupported(f"torch.compile has no backend {self.backend!r}; it has: {', '.join(known)}")
        if self.backend == "inductor":
            need_toolchain(next(target.denoiser.parameters()).device)

    def apply(self, target: "Target", patches: "Patches") -> None:
        """Regions are chosen when every technique has been applied: caches are, after this one."""
        patches.on_ready(functools.partial(self.compile, target, patches))

    def compile(self, target: "Target", patches: "Patches") -> None:
        compiled = functools.cache(functools.partial(compiled_forward, counting(self.backend), patches))
        for denoiser in target.denoisers.values():
            for region in (found for root in repeated(denoiser) or [denoiser] for found in regions(root, patches)):
                patches.wrap_innermost(region, running(region, compiled(type(region)), patches))


# ---------------------------------------------------------------------------------------------------- regions


def repeated(denoiser: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer: members of lists at its top most of which are alike. A UNet has none."""
    if hasattr(denoiser, "up_blocks"):
        return []
    lists = [list(child) for child in denoiser.children() if isinstance(child, nn.ModuleList)]
    return [block for blocks in lists if alike(blocks) for block in blocks]


def alike(blocks: list[nn.Module]) -> bool:
    shapes = Counter((type(b), tuple((name, p.shape) for name, p in b.named_parameters())) for b in blocks)
    return bool(shapes) and max(shapes.values()) >= max(2, len(blocks) / 2)


def regions(module: nn.Module, patches: "Patches") -> Iterator[nn.Module]:
    """The largest modules from `module` down that have parts, a forward, and no wrapper inside.

    A wrapper on a region itself stays outside of it: the compiled forward runs beneath all arounds.
    """
    parts = list(module.children())
    if type(module).forward is nn.Module.forward or any(map(patches.wrapped, parts)):
        for part in parts:
            yield from regions(part, patches)
    elif parts:
        yield module


# ---------------------------------------------------------------------------------------------------- compiled code


def running(region: nn.Module, compiled: Callable[..., Any], patches: "Patches") -> Callable[..., Any]:
    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = open_run()
        obstacle = run.slot((CompileBlocks, region), lambda: obstacle_in(region, patches))
        if obstacle is None:
            return compiled(region, *map(laid_out, args), **{name: laid_out(value) for name, value in kwargs.items()})
        run.report.note(f"{type(region).__name__} ran uncompiled: {obstacle}")
        return inner(*args, **kwargs)

    return around


def laid_out(value: Any) -> Any:
    """Tokens in memory of their own, in the order of their dimensions: the first block of a list often gets a view or a
    transposed tensor, the others never, and a graph is good for one of these only. Pictures keep their format."""
    if not isinstance(value, torch.Tensor) or value.ndim != 3:
        return value
    plain = value.stride() == (value.shape[1] * value.shape[2], value.shape[2], 1) and not value._is_view()
    return value if plain else value.clone(memory_format=torch.contiguous_format)


def obstacle_in(region: nn.Module, patches: "Patches") -> str | None:
    """What came into a region after it was chosen, and must not be traced."""
    if hooked_inside(region):
        return "its parts have offload hooks; use enable_model_cpu_offload"
    if any(map(patches.wrapped, region.children())):
        return "another pipeline that shares it has wrapped its parts since; attach that one first"
    return None


def compiled_forward(backend: Callable[..., Any], patches: "Patches", cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a class, compiled for one attachment: its equal blocks share graphs.

    Compiled on a code object of its own. torch keeps graphs on the code object, so these do not meet those of the
    user's own torch.compile, and can be dropped alone.
    """
    plain: Any = cls.forward
    code = plain.__code__.replace()
    own = types.FunctionType(code, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    own.__kwdefaults__ = plain.__kwdefaults__
    patches.on_undo(functools.partial(torch._dynamo.eval_frame.remove_from_cache, own))
    compiler: Any = torch.compile  # its overloads lack the limit
    return compiler(own, backend=backend, recompile_limit=GRAPHS)


def counting(name: str) -> Callable[..., Any]:
    """The backend, counting the graphs that it compiles."""
    backend = torch._dynamo.lookup_backend(name)

    def compile_graph(graph: Any, inputs: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is not None:
            run.count(CompileBlocks.name, "compiled")
        return backend(graph, inputs, **kwargs)

    return compile_graph


def need_toolchain(device: torch.device) -> None:
    """inductor writes C++ for CPUs and Triton for the others."""
    from torch._inductor import cpp_builder
    from torch.utils import _triton

    if device.type != "cpu":
        if not _triton.has_triton():
            raise Unsupported(f"CompileBlocks needs Triton on {device.type}: pip install triton")
        return
    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:
        raise Unsupported(
            "CompileBlocks needs a C++ compiler on a CPU, and there is none: install g++ or clang, or name one in the "
            "environment variable CXX"
        ) from error
