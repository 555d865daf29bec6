"""FirstBlockCache: the first block tells whether the others are worth computing.

*What* computes the first block at each step; where what it adds has hardly changed since the rest was last computed,
what the rest added then is added again. On a UNet the first layer decides over the deep part.
*Pays when* steps are many and the model deep: the first block is the part that is always paid.
*Hurts when* the model has few blocks, and where thresholds are carried from one model to another: run once and read
the report, which gives the range of the measured changes.
*Exact?* no; `threshold=0` is.
*Settings* `threshold`: the relative change below which is reused; `max_consecutive`: at most so often in a row.
*Source* first block caches of ParaAttention (github.com/chengzeyi/ParaAttention) and diffusers. Differs: decides for
each row of the batch, guidance branches apart, UNets too.
*Measured* 25 steps, guidance 3, one picture a call, one thread of a Zen 5 CPU, interleaved (`fewstep bench peers`).
emoji-unet, 7 pairs, 24 pictures: threshold 0.1 1.08 (1.04..1.09) at 48.2 dB, 0.2 1.16 (1.01..1.17) at 40.6 dB, 0.3
1.23 (1.13..1.26) at 36.6 dB: guidance branches that decide apart cost two small calls in place of one, which on so
small a UNet eats the gain. emoji-dit, 5 pairs, 12 pictures: 0.1 1.32 (1.28..1.40) at 40.6 dB, 0.15 1.53 (1.42..1.79)
at 33.7 dB, 0.2 1.81 (1.61..2.08) at 32.4 dB; draws diffusers' pictures, 0.88 (0.77..1.00) to 1.18 times as fast, 0.99
(0.97..0.99) times on a random model of Flux's shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import Unsupported
from ..patches import Patches
from ..policy import Dynamic, Policy
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .reuse import Cache, need_rows
from .transformer_span import lists, probe_block, span_blocks
from .unet_span import deepest, is_unet, probe_layer, span_unet


@dataclass(frozen=True, kw_only=True)
class FirstBlockCache(Technique):
    """Reuses all but the first block while that one changes little."""

    name: ClassVar[str] = "first_block_cache"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("reuse of blocks")})

    threshold: float = 0.15
    max_consecutive: int = 3

    @property
    def policy(self) -> Policy:
        return Dynamic(self.threshold, self.max_consecutive)

    def check(self, target: Target) -> None:
        for denoiser in target.denoisers.values():
            need_rows(denoiser, type(self).__name__)
            if is_unet(denoiser):
                deepest(denoiser, type(self).__name__)
            elif sum(map(len, lists(denoiser, type(self).__name__))) < 2:
                raise Unsupported(f"FirstBlockCache needs two blocks or more; {type(denoiser).__name__} has one")

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            cache = Cache(self.name, denoiser, self.policy)
            span_after_first(cache, patches)
            cache.attach(patches)

    def identity(self) -> "FirstBlockCache":
        return FirstBlockCache(threshold=0.0)

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        return {"threshold": (0.05, 0.1, 0.15, 0.2, 0.3), "max_consecutive": (1, 2, 3)}


def span_after_first(cache: Cache, patches: Patches) -> None:
    """All but the first block of a transformer, all below the first layer of a UNet, behind a probe."""
    if is_unet(cache.denoiser):
        span_unet(cache, patches, 1)
        probe_layer(cache, patches)
        return
    first, *rest = lists(cache.denoiser, cache.name)
    for blocks in (first[1:], *rest):
        if blocks:
            span_blocks(cache, patches, blocks)
    probe_block(cache, patches, first[0])
