"""TeaCache: the time-modulated input of the first block tells whether the blocks are worth computing.

*What* before the first block of an evaluation runs, measures by how much its modulated input (its first norm, shifted
and scaled by the time embedding) has changed since the evaluation before, and adds that up since the last computed one.
While the sum is small all blocks are skipped, and what they added then is added again. On a UNet the output of the
first resnet, which the time embedding enters, decides over the deep part, and the first layer is computed always.
*Pays when* steps are many: a skipped evaluation costs one norm, where FirstBlockCache pays a block.
*Hurts when* thresholds or coefficients are carried from one model to another, and where the input says little about the
output: `fewstep fit indicator` measures this on the model itself, and a polynomial holds in the range that it was
fitted in.
*Exact?* no; `threshold=0` is.
*Settings* `threshold`: the sum below which is reused; `max_consecutive`: at most so often in a row; `coefficients`: of
the polynomial that rescales each change, highest power first, as `fewstep fit indicator` writes them; (1, 0) is none.
*Source* TeaCache, Liu et al. 2024, arXiv:2411.19108. Differs: decides for each row of the batch, guidance branches
apart; takes no number of steps, so the last one is not forced; a polynomial that falls below zero counts as zero.
*Measured* 25 steps, guidance 3, one picture a call, one thread of a Zen 5 CPU, interleaved (`fewstep bench peers`).
emoji-unet, 7 pairs, 24 pictures: threshold 0.1 1.15 (1.12..1.20) at 47.0 dB, 0.2 1.42 (1.42..1.50) at 40.1 dB, 0.3
1.62 (1.55..1.65) at 35.7 dB. emoji-dit, 5 pairs, 12 pictures: 0.1 1.51 (1.47..1.54) at 39.3 dB, 0.15 2.10 (1.89..2.35)
at 34.2 dB, 0.2 2.37 (2.11..2.50) at 32.6 dB; at equal PSNR 1.11 (0.97..1.26) to 1.92 (1.68..2.19) times as fast as
diffusers' FirstBlockCache.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from .. import anatomy
from ..errors import InvalidRecipe, Unsupported
from ..patches import Patches
from ..policy import Dynamic, Past, need
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .reuse import Cache, Mixed, Reuse, need_rows, sampled
from .transformer_span import Contract, lists, span_blocks
from .unet_span import deepest, down_layers, is_unet, span_unet, tensor_of

IDENTITY = (1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class TeaCache(Technique):
    """Reuses what all blocks add while the modulated input of the first has changed little."""

    name: ClassVar[str] = "tea_cache"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("reuse of blocks")})

    threshold: float = 0.15
    max_consecutive: int = 3
    coefficients: tuple[float, ...] = IDENTITY

    def __post_init__(self) -> None:
        object.__setattr__(self, "coefficients", tuple(self.coefficients))
        words = f"TeaCache(coefficients={self.coefficients!r}): one number or more, the highest power first"
        need(bool(self.coefficients) and all(is_number(c) for c in self.coefficients), words)

    @classmethod
    def from_file(cls, path: str | Path, **settings: Any) -> "TeaCache":
        """With the coefficients that `fewstep fit indicator` wrote. Raises `InvalidRecipe` for any other file."""
        advice = "make one with: fewstep fit indicator MODEL --prompts FILE --out indicator.json"
        try:
            coefficients = json.loads(Path(path).read_text())["coefficients"]
        except FileNotFoundError:
            raise InvalidRecipe(f"no indicator at {path}: {advice}") from None
        except (ValueError, KeyError, TypeError):
            raise InvalidRecipe(f"{path} holds no fitted indicator: {advice}") from None
        return cls(coefficients=tuple(coefficients), **settings)

    @property
    def policy(self) -> Dynamic:
        return Dynamic(self.threshold, self.max_consecutive)

    def check(self, target: Target) -> None:
        for denoiser in target.denoisers.values():
            need_rows(denoiser, type(self).__name__)
            if is_unet(denoiser):
                deepest(denoiser, type(self).__name__)
            else:
                modulation(first_block(lists(denoiser, type(self).__name__)))

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            self.put_on(ModulatedCache(self.name, denoiser, self.policy), patches)

    def put_on(self, cache: "ModulatedCache", patches: Patches) -> None:
        cache.coefficients = self.coefficients
        span_behind_probe(cache, patches)
        cache.attach(patches)

    def identity(self) -> "TeaCache":
        return TeaCache(threshold=0.0)

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        return {"threshold": (0.05, 0.1, 0.15, 0.2, 0.3, 0.5), "max_consecutive": (1, 2, 3)}


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


# ---------------------------------------------------------------------------------------------------- the sum


class ModulatedCache(Cache):
    """Decides before the first block, by a sum of changes."""

    coefficients: Sequence[float] = IDENTITY

    def fresh(self) -> "Accumulated":
        return Accumulated(self)

    def before(self, feature: Callable[[Any, Any], Tensor]) -> Callable[..., Any]:
        """An around for the first block, outside of its span's; `feature(args, kwargs)` is what is watched."""

        def around(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            state = self.state()
            if state.reusing is None:  # else decided in a group, which this is the call for
                self.need_all_rows(state)
                flags = state.probe(feature(args, kwargs))
                if len(set(flags)) > 1:
                    raise Mixed(flags)
                state.settle(flags[0])
            return inner(*args, **kwargs)

        return around


class Accumulated(Reuse):
    """Its `change` is the sum of the rescaled changes from one evaluation to the next since the last computed one."""

    cache: ModulatedCache

    def probe(self, feature: Tensor) -> list[bool]:
        flags = super().probe(feature)
        self.watched.put(self.keys, (sampled(feature),))  # the next change counts from here, computed or not
        return flags

    def change(self, feature: Tensor) -> list[float]:
        steps = rescaled(super().change(feature), self.cache.coefficients)
        return [self.sum_before(key) + step for key, step in zip(self.keys, steps, strict=True)]

    def sum_before(self, key: Any) -> float:
        past = self.past.get(key, Past())
        return past.change if past.reused else 0.0


def rescaled(changes: Sequence[float], coefficients: Sequence[float]) -> list[float]:
    """The polynomial of each change, not below zero; nan stays nan."""
    return np.maximum(np.polyval(coefficients, np.asarray(changes)), 0.0).tolist()


def span_behind_probe(cache: ModulatedCache, patches: Patches) -> None:
    """All blocks of a transformer, all below the first layer of a UNet."""
    if is_unet(cache.denoiser):
        span_unet(cache, patches, 1)
        resnet = down_layers(anatomy._bare(cache.denoiser))[0].modules[0]
        patches.wrap_forward(resnet, cache.probing(lambda args, kwargs, output: tensor_of(output)))
        return
    found = lists(cache.denoiser, cache.name)
    for blocks in found:
        if blocks:
            span_blocks(cache, patches, blocks)
    first = first_block(found)
    feature = functools.partial(modulated_input, first, Contract(first), modulation(first))
    patches.wrap_forward(first, cache.before(feature))


def first_block(found: Sequence[Sequence[nn.Module]]) -> nn.Module:
    return next(block for blocks in found for block in blocks)


# ---------------------------------------------------------------------------------------------------- modulation


class Given(dict[str, Any]):
    """A block's arguments by name; one that was not given is None."""

    def __missing__(self, name: str) -> None:
        return None


Modulation = Callable[[Any, Given], Tensor]


def modulated_input(block: nn.Module, contract: Contract, modulate: Modulation, args: Any, kwargs: Any) -> Tensor:
    return modulate(block, Given(zip(contract.parameters, args, strict=False), **kwargs))


def modulation(block: nn.Module) -> Modulation:
    """How `block` modulates its input by the time. Raises `Unsupported` where it is not known that it does."""
    found = anatomy._by_class(type(block), MODULATED)
    if found is basic:
        found = BASIC.get(str(getattr(block, "norm_type", "")))
    if found is None:
        raise Unsupported(
            f"TeaCache does not know how {type(block).__name__} modulates its input by the time: use FirstBlockCache, "
            "which needs not know, or describe it in fewstep.accel.cache.modulated.MODULATED"
        )
    return found


def of_norm(block: Any, given: Given) -> Tensor:
    """AdaLayerNormZero and its kin, which give the modulated input first and the gates after it."""
    return block.norm1(given["hidden_states"], emb=given["temb"])[0]


def of_shift_norm(block: Any, given: Given) -> Tensor:
    return block.norm1(given["hidden_states"], given["temb"])


def of_picture_norm(block: Any, given: Given) -> Tensor:
    """Chroma's temb holds the modulation itself, the picture's six rows before the text's."""
    return block.norm1(given["hidden_states"], emb=given["temb"][:, :6])[0]


def of_joint_norm(block: Any, given: Given) -> Tensor:
    """One norm for picture and text; CogView3+ names the embedding emb."""
    embedding = given["emb"] if given["temb"] is None else given["temb"]
    return block.norm1(given["hidden_states"], given["encoder_hidden_states"], embedding)[0]


def of_labelled_norm(block: Any, given: Given) -> Tensor:
    hidden = given["hidden_states"]
    return block.norm1(hidden, given["timestep"], given["class_labels"], hidden_dtype=hidden.dtype)[0]


def of_timestep_norm(block: Any, given: Given) -> Tensor:
    return block.norm1(given["hidden_states"], given["timestep"])


def of_table(block: Any, given: Given) -> Tensor:
    """A table of the block plus six rows for each image, or for each image and token: shift and scale come first."""
    hidden = given["hidden_states"]
    time = given["timestep"] if given["temb"] is None else given["temb"]
    rows = time.unflatten(-1, (len(block.scale_shift_table), -1))
    return shifted(block.norm1(hidden), *(block.scale_shift_table + rows).unbind(-2)[:2])


def of_float_table(block: Any, given: Given) -> Tensor:
    """Wan: the same in float32."""
    hidden, temb = given["hidden_states"], given["temb"].float()
    return shifted(block.norm1(hidden.float()), *(block.scale_shift_table + temb).unbind(-2)[:2])


def of_forced_table(block: Any, given: Given) -> Tensor:
    """SkyReels: as Wan, but a temb for each token has the six rows before the tokens."""
    hidden, temb = given["hidden_states"], given["temb"].float()
    if temb.ndim == 4:
        temb = temb.transpose(1, 2)
    return shifted(block.norm1(hidden.float()), *(block.scale_shift_table + temb).unbind(-2)[:2])


def of_flux2(block: Any, given: Given) -> Tensor:
    """The modulation comes ready: shift, scale and gate, twice."""
    return shifted(block.norm1(given["hidden_states"]), *given["temb_mod_img"].chunk(6, dim=-1)[:2])


def of_qwen(block: Any, given: Given) -> Tensor:
    modulation = block.img_mod(given["temb"]).chunk(2, dim=-1)[0]
    return block._modulate(block.img_norm1(given["hidden_states"]), modulation, given["modulate_index"])[0]


def of_z_image(block: Any, given: Given) -> Tensor:
    """A scale alone. With clean tokens among the noisy ones, the scale of the noisy: only those change."""
    time = given["adaln_noisy"] if given["adaln_input"] is None else given["adaln_input"]
    scale = block.adaLN_modulation(time).chunk(4, dim=-1)[0]
    return block.attention_norm1(given["x"]) * (1 + scale.unsqueeze(1))


def basic(block: Any, given: Given) -> Tensor:
    return BASIC[block.norm_type](block, given)


def shifted(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """For each image one row, which all tokens share, or one for each token."""
    if shift.ndim == 2:
        shift, scale = shift.unsqueeze(1), scale.unsqueeze(1)
    return normed * (1 + scale) + shift


# What a BasicTransformerBlock does with the time, by its `norm_type`; the others do nothing with it.
BASIC: dict[str, Modulation] = {
    "ada_norm": of_timestep_norm,
    "ada_norm_zero": of_labelled_norm,
    "ada_norm_single": of_table,
}

# By class of the first block, read in diffusers 0.42.
MODULATED: dict[str, Modulation] = {
    name: function
    for function, names in (
        (basic, "BasicTransformerBlock"),
        (
            of_norm,
            """
            FluxTransformerBlock JointTransformerBlock AuraFlowJointTransformerBlock BriaTransformerBlock
            LongCatImageTransformerBlock OvisImageTransformerBlock HunyuanVideoTransformerBlock
            HunyuanVideo15TransformerBlock HunyuanImageTransformerBlock MochiTransformerBlock Lumina2TransformerBlock
            LuminaNextDiTBlock
            """,
        ),
        (of_shift_norm, "HunyuanDiTBlock"),
        (of_picture_norm, "ChromaTransformerBlock"),
        (
            of_joint_norm,
            """
            CogVideoXBlock ConsisIDBlock CogView3PlusTransformerBlock CogView4TransformerBlock
            EasyAnimateTransformerBlock
            """,
        ),
        (
            of_table,
            """
            SanaTransformerBlock SanaVideoTransformerBlock AllegroTransformerBlock LTXVideoTransformerBlock
            """,
        ),
        (of_float_table, "WanTransformerBlock"),
        (of_forced_table, "SkyReelsV2TransformerBlock"),
        (of_flux2, "Flux2TransformerBlock"),
        (of_qwen, "QwenImageTransformerBlock"),
        (of_z_image, "ZImageTransformerBlock"),
    )
    for name in names.split()
}
