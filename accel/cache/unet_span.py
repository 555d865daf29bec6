"""The deep part of a UNet, between the layers next to the input and those next to the output.

A UNet's down layers hand one feature each across to an up layer. With `depth` d the first d down layers and the last
d + 1 up layers are computed always; what the rest makes, the feature that enters the first of those up layers, is kept.
Blocks that lie in the deep part whole are skipped whole, of the two at its border single layers. Skipped parts return
zeros, which the UNet's own code goes on handing around, and nobody reads; where it would join them, with one channel.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from diffusers.utils import BaseOutput
from torch import Tensor, nn

from .. import anatomy
from ..errors import Unsupported
from ..patches import Patches
from .reuse import Cache, Reuse

# Modules of one layer, in the order of their work, as every block of these UNets names its lists.
PARTS = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")
_BLOCKS = """
    DownBlock2D CrossAttnDownBlock2D AttnDownBlock2D ResnetDownsampleBlock2D SimpleCrossAttnDownBlock2D
    UpBlock2D CrossAttnUpBlock2D AttnUpBlock2D ResnetUpsampleBlock2D SimpleCrossAttnUpBlock2D
    DownBlock3D CrossAttnDownBlock3D UpBlock3D CrossAttnUpBlock3D
    DownBlockMotion CrossAttnDownBlockMotion UpBlockMotion CrossAttnUpBlockMotion
    DownBlockSpatioTemporal CrossAttnDownBlockSpatioTemporal UpBlockSpatioTemporal CrossAttnUpBlockSpatioTemporal
    """
BLOCKS = frozenset(_BLOCKS.split())


@dataclass(frozen=True)
class Layer:
    """Modules between two skip connections, and the block that they are of."""

    block: nn.Module
    modules: tuple[nn.Module, ...]


def is_unet(denoiser: nn.Module) -> bool:
    return hasattr(anatomy._bare(denoiser), "up_blocks")


def down_layers(unet: Any) -> list[Layer]:
    return [layer for block in unet.down_blocks for layer in layers(block, "downsamplers")]


def up_layers(unet: Any) -> list[Layer]:
    """An upsampler makes no skip connection: it ends the layer before it."""
    found: list[Layer] = []
    for block in unet.up_blocks:
        *rest, last = [m for m in layers(block, "upsamplers")]
        if getattr(block, "upsamplers", None):
            rest[-1] = Layer(block, (*rest[-1].modules, *last.modules))
        else:
            rest.append(last)
        found += rest
    return found


def layers(block: Any, sampler: str) -> Iterator[Layer]:
    lists = [getattr(block, part) for part in PARTS if getattr(block, part, None)]
    for place in range(len(block.resnets)):
        yield Layer(block, tuple(found[place] for found in lists))
    if getattr(block, sampler, None):
        yield Layer(block, tuple(getattr(block, sampler)))


def deepest(denoiser: nn.Module, technique: str) -> int:
    """The largest `depth`; raises `Unsupported` for a denoiser whose blocks are not known."""
    unet: Any = anatomy._bare(denoiser)
    if not is_unet(unet):
        raise Unsupported(
            f"{technique} needs a UNet; {type(unet).__name__} is a transformer: use FirstBlockCache or Forecast"
        )
    strange = {type(b).__name__ for b in (*unet.down_blocks, *unet.up_blocks)} - BLOCKS
    if strange:
        raise Unsupported(
            f"{technique} does not know the blocks {', '.join(sorted(strange))} of this UNet: leave it out"
        )
    return len(down_layers(unet)) - 1


def span_unet(cache: Cache, patches: Patches, depth: int) -> None:
    """Makes what lies deeper than `depth` the span of `cache`."""
    unet: Any = anatomy._bare(cache.denoiser)
    down, up = down_layers(unet), up_layers(unet)
    skipped = [*down[depth:], *up[: len(up) - depth - 1]]
    modules = [*whole_or_parts(skipped, down, up)]
    middle = [unet.mid_block] if getattr(unet, "mid_block", None) is not None else []
    exit, rising = modules[-1], modules_of(up)
    for module in (*modules[:-1], *middle):
        thin = any(module is one for one in rising)
        patches.wrap_forward(module, functools.partial(around_skipped, cache, module, thin))
    patches.wrap_forward(exit, functools.partial(around_exit, cache, exit))


def whole_or_parts(skipped: list[Layer], down: list[Layer], up: list[Layer]) -> Iterator[nn.Module]:
    """The blocks of which every layer is skipped, and single modules of the others, in the order of their work."""
    seen: list[nn.Module] = []
    for layer in skipped:
        of_block = [other for other in (*down, *up) if other.block is layer.block]
        if all(any(other is one for one in skipped) for other in of_block):
            if not any(layer.block is block for block in seen):
                seen.append(layer.block)
                yield layer.block
        else:
            yield from layer.modules


def modules_of(layers: list[Layer]) -> list[nn.Module]:
    return [module for layer in layers for module in (layer.block, *layer.modules)]


def around_skipped(
    cache: Cache, module: nn.Module, thin: bool, inner: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    state = cache.state()
    if state.reusing:
        return blank(state, module, thin)
    output = inner(*args, **kwargs)
    if module not in state.blanks:
        state.blanks[module] = shapes(output, len(state.rows))
    return output


def around_exit(cache: Cache, module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = cache.state()
    if state.reusing:
        return fill(state.blanks[module], state.predict(module)[0])
    output = inner(*args, **kwargs)
    if module not in state.blanks:
        state.blanks[module] = shapes(output, len(state.rows))
    state.keep(module, (tensor_of(output),))
    return output


def probe_layer(cache: Cache, patches: Patches) -> None:
    """Decides after the first down layer by what it made."""
    first = down_layers(anatomy._bare(cache.denoiser))[0].modules[-1]
    patches.wrap_forward(first, cache.probing(lambda args, kwargs, output: tensor_of(output)))


# ---------------------------------------------------------------------------------------------------- blanks


@dataclass(frozen=True)
class Shape:
    """A tensor's shape, its first dimension counted in rows."""

    per_row: int
    rest: tuple[int, ...]
    like: Tensor  # empty: carries device and type

    def zeros(self, rows: int, thin: bool) -> Tensor:
        channels, *picture = self.rest
        return self.like.new_zeros((rows * self.per_row, 1 if thin else channels, *picture))


def shapes(output: Any, rows: int) -> Any:
    """The output with every tensor's shape in its place."""
    if isinstance(output, Tensor):
        return Shape(len(output) // rows, tuple(output.shape[1:]), output.new_empty(0))
    return rebuilt(output, lambda entry: shapes(entry, rows))


def blank(state: Reuse, module: nn.Module, thin: bool) -> Any:
    """Zeros in the module's shapes, made once for a number of rows."""
    rows = len(state.rows)
    key = (module, rows)
    if key not in state.blanks:
        state.blanks[key] = zeros(state.blanks[module], rows, thin)
    return state.blanks[key]


def zeros(form: Any, rows: int, thin: bool) -> Any:
    """What a down block returns first is handed down in its full width: adapters add to it in place. The rest of its
    output, skip connections, and all that goes up is only joined, which costs by the channel."""
    if isinstance(form, Shape):
        return form.zeros(rows, thin)
    return rebuilt(form, lambda entry: zeros(entry, rows, thin or not isinstance(entry, Shape)))


def fill(form: Any, value: Any) -> Any:
    """The one tensor of an exit's output, in the form in which the exit returns it."""
    return value if isinstance(form, Shape) else rebuilt(form, lambda entry: fill(entry, value))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, BaseOutput):
        return type(value)(**{name: change(entry) for name, entry in value.items()})
    if isinstance(value, (tuple, list)):
        return type(value)(change(entry) for entry in value)
    return value


def tensor_of(output: Any) -> Tensor:
    """The one tensor of a module's output."""
    if isinstance(output, Tensor):
        return output
    return tensor_of(next(iter(output.values() if isinstance(output, dict) else output)))
