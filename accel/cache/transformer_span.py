"""Where a transformer's blocks lie and what flows through them, as tables by class, read in diffusers 0.42.

Kept of a span of blocks is what it adds to each stream, so that a reused span still follows what comes in.
"""

import functools
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn

from .. import anatomy
from ..errors import Unsupported
from ..patches import Patches
from ..rows import Values
from .reuse import Cache, Reuse, fits, minus, sampled

# The lists of blocks that one forward runs through, one after the other; with a plus, nothing but residuals of a
# ControlNet comes in between, and they are one span. Latte's are interleaved, so it has none here.
LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(lists.split())
    for lists, names in (
        (
            "transformer_blocks",
            """
            Transformer2DModel DiTTransformer2DModel PixArtTransformer2DModel SanaTransformer2DModel
            SanaVideoTransformer3DModel SD3Transformer2DModel CogVideoXTransformer3DModel ConsisIDTransformer3DModel
            CogView3PlusTransformer2DModel CogView4Transformer2DModel QwenImageTransformer2DModel
            LTXVideoTransformer3DModel AllegroTransformer3DModel MochiTransformer3DModel StableAudioDiTModel
            HunyuanVideo15Transformer3DModel EasyAnimateTransformer3DModel
            """,
        ),
        (
            "transformer_blocks+single_transformer_blocks",
            """
            FluxTransformer2DModel BriaTransformer2DModel LongCatImageTransformer2DModel OvisImageTransformer2DModel
            HunyuanVideoTransformer3DModel HunyuanImageTransformer2DModel
            """,
        ),
        ("transformer_blocks single_transformer_blocks", "Flux2Transformer2DModel ChromaTransformer2DModel"),
        ("joint_transformer_blocks single_transformer_blocks", "AuraFlowTransformer2DModel"),
        (
            "blocks",
            """
            WanTransformer3DModel SkyReelsV2Transformer3DModel ChronoEditTransformer3DModel HunyuanDiT2DModel
            PRXTransformer2DModel
            """,
        ),
        ("layers", "Lumina2Transformer2DModel ZImageTransformer2DModel LuminaNextDiT2DModel"),
    )
    for name in names.split()
}

# What a block returns, by the names of its arguments. A class that is not here returns its first argument alone.
_TEXT_FIRST = """
    FluxTransformerBlock FluxSingleTransformerBlock Flux2TransformerBlock ChromaTransformerBlock BriaTransformerBlock
    BriaSingleTransformerBlock LongCatImageTransformerBlock LongCatImageSingleTransformerBlock
    OvisImageTransformerBlock OvisImageSingleTransformerBlock JointTransformerBlock AuraFlowJointTransformerBlock
    QwenImageTransformerBlock
    """
_PICTURE_FIRST = """
    CogVideoXBlock ConsisIDBlock CogView3PlusTransformerBlock CogView4TransformerBlock HunyuanVideoTransformerBlock
    HunyuanVideoSingleTransformerBlock HunyuanVideoTokenReplaceTransformerBlock
    HunyuanVideoTokenReplaceSingleTransformerBlock HunyuanVideo15TransformerBlock HunyuanImageTransformerBlock
    HunyuanImageSingleTransformerBlock MochiTransformerBlock EasyAnimateTransformerBlock
    """
RETURNS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_TEXT_FIRST.split(), ("encoder_hidden_states", "hidden_states")),
    **dict.fromkeys(_PICTURE_FIRST.split(), ("hidden_states", "encoder_hidden_states")),
}


def lists(denoiser: nn.Module, technique: str) -> list[list[nn.Module]]:
    """The blocks in the order of their work, list by list. A transformer that is in no table is taken if all its blocks
    stand in one list and are alike; its first evaluation then proves that one stream flows through them. Raises
    `Unsupported` otherwise."""
    bare = anatomy._bare(denoiser)
    names = anatomy._by_class(type(bare), LISTS)
    if names is not None:
        return [[block for part in name.split("+") for block in getattr(bare, part)] for name in names]
    found = [list(child) for child in bare.children() if isinstance(child, nn.ModuleList) and len(child) > 1]
    if len(found) == 1 and len({type(block) for block in found[0]}) == 1 and not hasattr(bare, "up_blocks"):
        return found
    raise Unsupported(
        f"{technique} does not know the blocks of {type(bare).__name__}: name its lists of blocks, in the order of "
        "their work, in fewstep.accel.cache.transformer_span.LISTS, and what its blocks return in RETURNS"
    )


class Contract:
    """The streams of one class of blocks: read from the arguments, packed as the block returns them."""

    def __init__(self, block: nn.Module) -> None:
        self.parameters = list(signature(type(block).forward).parameters)[1:]
        self.returns = anatomy._by_class(type(block), RETURNS) or (self.parameters[0],)

    def read(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Values:
        return tuple(self.argument(name, args, kwargs) for name in self.returns)

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place = self.parameters.index(name)
        return kwargs[name] if name in kwargs else args[place] if place < len(args) else None

    def unpack(self, output: Any) -> Values:
        return output if isinstance(output, tuple) else (output,)

    def whole(self, values: Values) -> Values:
        return values

    def picture(self, values: Values) -> Values:
        """Without the text: what the last block of all makes of it nobody reads."""
        return tuple(v if name == self.parameters[0] else None for name, v in zip(self.returns, values, strict=True))

    def pack(self, values: Values) -> Any:
        return values if len(self.returns) > 1 else values[0]


def span_blocks(cache: Cache, patches: Patches, blocks: Sequence[nn.Module]) -> None:
    """Makes `blocks`, which follow one another, a span of `cache`."""
    ends = blocks[-1] is [block for found in lists(cache.denoiser, cache.name) for block in found][-1]
    for place, block in enumerate(blocks):
        first, last = place == 0, place == len(blocks) - 1
        contract = Contract(block)
        kept = contract.picture if ends else contract.whole
        patches.wrap_forward(block, functools.partial(around_block, cache, blocks[0], contract, kept, first, last))


def around_block(
    cache: Cache,
    span: nn.Module,
    contract: Contract,
    kept: Callable[[Values], Values],
    first: bool,
    last: bool,
    inner: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    state = cache.state()
    if first:
        enter(state, span, contract.read(args, kwargs))
    if state.reusing:
        streams = contract.read(args, kwargs)
        return contract.pack(state.predict(span, state.entry.pop(span)) if last else streams)
    output = inner(*args, **kwargs)
    if not is_known(cache.denoiser):
        prove(state, span, contract.read(args, kwargs)[0], output, first)
    if last:
        state.keep(span, minus(kept(contract.unpack(output)), state.entry.pop(span)))
    return output


def is_known(denoiser: nn.Module) -> bool:
    return anatomy._by_class(type(anatomy._bare(denoiser)), LISTS) is not None


def prove(state: Reuse, span: nn.Module, stream: Any, output: Any, first: bool) -> None:
    """Of a transformer in no table: each block takes what the one before it returned, a tensor of the same shape."""
    flow = state.blanks.get(("flow", span))
    if not isinstance(output, Tensor) or output.shape != stream.shape or not (first or stream is flow):
        model = type(state.cache.denoiser).__name__
        raise Unsupported(
            f"{state.cache.name}: more than one stream flows through the blocks of {model}, or something "
            "happens between them: describe it in fewstep.accel.cache.transformer_span.LISTS and RETURNS"
        )
    state.blanks["flow", span] = output


def enter(state: Reuse, span: nn.Module, streams: Values) -> None:
    """Remembers what comes in; rows whose kept values have another shape compute after all."""
    state.entry[span] = streams
    if state.reusing and not fits(state.spans[span].get(state.keys), streams):
        state.compute_after_all()


def probe_block(cache: Cache, patches: Patches, block: nn.Module) -> None:
    """Decides after `block` by what it added to the picture."""
    contract = Contract(block)
    place = contract.returns.index(contract.parameters[0])

    def feature(args: Any, kwargs: Any, output: Any) -> Any:
        came: Any = contract.read(args, kwargs)[place]
        went: Any = contract.unpack(output)[place]
        return sampled(went) - sampled(came)

    patches.wrap_forward(block, cache.probing(feature))
