"""AttentionBroadcast: the outputs of attention layers, kept and put in place again at later evaluations.

*What* computes self-, cross- and temporal attention each by a policy of its own and reuses their outputs in between;
everything else (convolutions, feed-forwards, modulation) follows the current latents. Layers in which text and picture
attend jointly (Flux, SD3, CogVideoX) count as spatial.
*Pays when* attention is most of the work: large pictures, video.
*Hurts when* the latents are small, so that convolutions and feed-forwards are the work; when memory is short (an output
of each layer and row is held until the call ends); and beneath CompileBlocks, which then compiles around each layer.
*Exact?* no; `Every(1)` for each is.
*Settings* `spatial`, `cross`, `temporal`: policies. Noise levels of their windows are `Row.sigma`: noise over signal,
of a flow its share, which is never above 1: there `Window(start=0.8, stop=0.1)`, for instance.
*Source* Pyramid Attention Broadcast, Zhao et al. 2024, arXiv:2408.12588, whose ranges (2, 6, 4) these are. Differs:
decided for each row of the batch, guidance branches apart; the window is in noise levels; of a layer that adds its own
input, what it adds is kept; the report counts rows of each kind of layer.
*Measured* 25 steps, guidance 3, one picture a call, one thread of a Zen 5 CPU, interleaved (`fewstep bench peers`).
emoji-unet (8x8 latents, attention a tenth of the operations), 7 pairs, 24 pictures: the default 1.05 (0.97..1.08) at
32.5 dB, `cross=Every(3) & Window(start=5.0, stop=0.3)` 1.07 (0.99..1.11) at 37.7 dB: cross-attention is what costs
quality there. emoji-dit, 5 pairs, 12 pictures: `spatial` of 2, 3 and 4 1.21 (1.07..1.22) at 36.2 dB, 1.23 (1.05..1.39)
at 31.0 dB, 1.31 (1.29..1.64) at 27.7 dB; diffusers' PAB is there at 19 to 20 dB.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from .. import anatomy
from ..errors import Unsupported
from ..patches import Around, Patches
from ..policy import Every, Policy, Window
from ..run import Row, open_run
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .reuse import Cache, Reuse, need_bounded, need_rows, packed, unpacked

KINDS = ("spatial", "cross", "temporal")
OFF = Every(1)

# Parts of a path that say that a layer attends over frames, each place of the picture by itself.
TEMPORAL = frozenset({"motion_modules", "temp_attentions", "temporal_transformer_blocks", "transformer_in"})

MIDDLE = Window(start=5.0, stop=0.3)  # timesteps 800 to 100 of Stable Diffusion's schedule, the paper's range


@dataclass(frozen=True, kw_only=True)
class AttentionBroadcast(Technique):
    """Reuses the outputs of attention layers."""

    name: ClassVar[str] = "attention_broadcast"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("reuse of attention")})

    spatial: Policy = Every(2) & MIDDLE
    cross: Policy = Every(6) & MIDDLE
    temporal: Policy = Every(4) & MIDDLE

    @property
    def policies(self) -> dict[str, Policy]:
        """Of each kind that is not off."""
        return {kind: policy for kind in KINDS if (policy := getattr(self, kind)) != OFF}

    def check(self, target: Target) -> None:
        for kind, policy in self.policies.items():
            need_bounded(policy, type(self).__name__, kind)
            if policy.watches:
                raise Unsupported("AttentionBroadcast watches nothing: for a Dynamic policy use FirstBlockCache")
        for denoiser in target.denoisers.values():
            need_rows(denoiser, type(self).__name__)
            need_kinds(denoiser, self.policies)

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            layers = by_kind(denoiser)
            for kind, policy in self.policies.items():
                if layers[kind]:
                    Broadcast(self.name, denoiser, policy).broadcast(patches, layers[kind])

    def identity(self) -> "AttentionBroadcast":
        return AttentionBroadcast(spatial=OFF, cross=OFF, temporal=OFF)

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        ranges = {"spatial": (1, 2, 3), "cross": (1, 3, 6), "temporal": (1, 2, 4)}
        return {kind: tuple(Every(n) & MIDDLE if n > 1 else OFF for n in ns) for kind, ns in ranges.items()}


# ---------------------------------------------------------------------------------------------------- layers


def attention_layers(denoiser: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of every layer that diffusers' attention processors compute."""
    named = anatomy._bare(denoiser).named_modules()
    return ((path, module) for path, module in named if getattr(module, "processor", None) is not None)


def by_kind(denoiser: nn.Module) -> dict[str, list[nn.Module]]:
    readers = readers_of(denoiser)
    found: dict[str, list[nn.Module]] = {kind: [] for kind in KINDS}
    for path, module in attention_layers(denoiser):
        found[kind_of(path, module, readers)].append(module)
    return found


def kind_of(path: str, module: nn.Module, readers: list[nn.Module]) -> str:
    """Text, or whatever else does not change between steps, comes first: the temporal layers of Stable Video Diffusion
    read an image embedding."""
    if getattr(module, "is_cross_attention", False) or any(module is reader for reader in readers):
        return "cross"
    return "temporal" if TEMPORAL.intersection(path.split(".")) else "spatial"


def readers_of(denoiser: nn.Module) -> list[nn.Module]:
    """The layers that read the text, of a model in no table none: those say themselves what they are."""
    try:
        return anatomy.cross_attention(denoiser)
    except Unsupported:
        return []


def need_kinds(denoiser: nn.Module, policies: Mapping[str, Policy]) -> None:
    """Raises `Unsupported` where every policy is for layers that there are none of."""
    present = [kind for kind, layers in by_kind(denoiser).items() if layers]
    if policies and not any(kind in present for kind in policies):
        has = (
            f"its attention is {' and '.join(present)}" if present else "it has none that diffusers' processors compute"
        )
        raise Unsupported(
            f"AttentionBroadcast has policies for {' and '.join(policies)} attention of {type(denoiser).__name__}, but "
            f"{has}: give a policy for that, or use DeepCache or FirstBlockCache"
        )


# ---------------------------------------------------------------------------------------------------- reuse


class Broadcast(Cache):
    """The attention layers of one denoiser that go by one policy."""

    def lasts(self, row: Row) -> bool:
        """Whether what this row computes now is worth keeping."""
        return True

    def broadcast(self, patches: Patches, layers: list[nn.Module]) -> None:
        for layer in layers:
            patches.wrap_forward(layer, broadcasting(self, layer))
        self.attach(patches)


def broadcasting(cache: Broadcast, layer: nn.Module) -> Around:
    """The layer's output: as its rows kept it, where they reuse and what comes in has the shape that it had."""

    def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = cache.state()
        hidden, shape = incoming(args, kwargs, len(state.rows))
        if shape is None:
            open_run().report.note(f"{cache.name}: {type(layer).__name__} has no rows in dimension 0: computed always")
            return inner(*args, **kwargs)
        span, share = turn(state, layer), own_share(layer)
        if state.reusing and not all(state.blanks.get((span, key), (None,))[0] == shape for key in state.keys):
            state.compute_after_all()
        if state.reusing:
            output = put_back(state, span)
            return output + share * hidden if share else output
        output = inner(*args, **kwargs)
        if any(map(cache.lasts, state.rows)):
            keep(cache, state, span, shape, output - share * hidden if share else output)
        return output

    return around


def incoming(args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> tuple[Any, Any]:
    """What attends, and the shapes of it and of what it reads, counted in rows; None if those cannot be told apart."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    read = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
    if not isinstance(hidden, Tensor) or len(hidden) % rows:
        return hidden, None
    return hidden, (len(hidden) // rows, hidden.shape[1:], read.shape[1:] if isinstance(read, Tensor) else None)


def turn(state: Reuse, layer: nn.Module) -> tuple[nn.Module, int]:
    """The layer and how often these rows have met it in this evaluation: FreeNoise calls it once a window of frames."""
    state.turns[layer, state.rows] += 1
    return layer, state.turns[layer, state.rows]


def own_share(layer: Any) -> float:
    """How much of its own input a layer adds to its output: in UNets without text, IF and Kandinsky 2 it does."""
    if "AddedKV" in type(layer.processor).__name__:
        return 1.0
    return 1.0 / layer.rescale_output_factor if getattr(layer, "residual_connection", False) else 0.0


def keep(cache: Broadcast, state: Reuse, span: Any, shape: Any, output: Any) -> None:
    values, form = unpacked(output)
    state.keep(span, values)
    for row, key in zip(state.rows, state.keys, strict=True):
        state.blanks[span, key] = shape, form
        if not cache.lasts(row):
            state.spans[span].drop([key])


def put_back(state: Reuse, span: Any) -> Any:
    _, form = state.blanks[span, state.keys[0]]
    return packed(state.predict(span), form)
