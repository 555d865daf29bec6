"""Forecast: between two computations features are extrapolated instead of reused.

*What* keeps what all blocks together added at the last few computed steps, and puts a polynomial through them over the
noise level; on a UNet, the feature of the deep part. The farther it carries the trend, the more it damps it.
*Pays when* features move smoothly: many steps, first-order and multistep samplers.
*Hurts when* samplers add noise at each step, and with long gaps: the polynomial leaves the data. Order 2 is seldom
better than 1.
*Exact?* no; `Every(1)` is.
*Settings* `when`: a policy, `Every(3)`; `order`: 0 reuse, 1 a line, 2 a parabola; `depth`, of a UNet; `damping`: at r
times the distance of the last two computed steps the trend counts 1 / (1 + r `damping`); 0 is the plain polynomial.
*Source* TaylorSeer, Liu et al. 2025, arXiv:2503.06923. Differs: Lagrange's form on the true noise levels, which are not
evenly spaced; only computed features are ever extrapolated from; the order rises as a row collects them; the trend is
damped, as forecasts of trends are since Gardner and McKenzie 1985, doi:10.1287/mnsc.31.10.1237.
*Measured* 25 steps, guidance 3, one picture a call, one thread of a Zen 5 CPU, interleaved, times as fast as plain
and PSNR to it (`fewstep bench peers`). emoji-unet, 7 pairs, 24 pictures: each second evaluation 1.59 (1.42..1.66) at
52.0 dB, third 1.95 (1.76..2.01) at 42.8, fifth 2.62 (2.36..2.75) at 31.4; 7 of 25 that `fewstep fit steps` found 2.16
(2.07..2.24) at 38.4. emoji-dit, 5 pairs, 12 pictures: second 1.79 (1.71..1.82) at 44.4 dB, third 2.42 (2.32..2.52) at
36.6, fifth 3.92 (3.87..4.45) at 27.7; 7 that were found 3.17 (3.01..3.38) at 34.8. Undamped, each fifth: 26.9 dB
there. At equal PSNR, with the evaluations found, 0.98 (0.86..1.13) times as fast as diffusers' TaylorSeer in its lite
mode at 43 dB, 1.41 (1.14..1.75) and 1.49 at 35 and 28; 1.21 to 1.73 times as its MagCache, 1.46 to 1.84 times as
cache-dit's DBCache with TaylorSeer. A damping that each row measures at its computed steps did no better.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import InvalidRecipe, Unsupported
from ..patches import Patches
from ..policy import EACH_THIRD, Every, Policy
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .first_block import span_after_first
from .reuse import Cache, need_bounded, need_rows
from .transformer_span import lists, span_blocks
from .unet_span import deepest, is_unet, span_unet


@dataclass(frozen=True, kw_only=True)
class Forecast(Technique):
    """Extrapolates what the blocks add."""

    name: ClassVar[str] = "forecast"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("reuse of blocks")})

    when: Policy = EACH_THIRD
    order: int = 1
    depth: int = 0
    damping: float = 0.5

    def check(self, target: Target) -> None:
        need_bounded(self.when, type(self).__name__)
        if self.order not in (0, 1, 2):
            raise Unsupported(f"Forecast(order={self.order}): 0 reuses, 1 draws a line, 2 a parabola")
        if not 0 <= self.damping < math.inf:
            raise InvalidRecipe(f"Forecast(damping={self.damping!r}): 0, the undamped polynomial, or more, such as 0.5")
        for denoiser in target.denoisers.values():
            need_rows(denoiser, type(self).__name__)
            limit = deepest(denoiser, type(self).__name__) if is_unet(denoiser) else 0
            if not is_unet(denoiser):
                lists(denoiser, type(self).__name__)
            if not 0 <= self.depth <= limit:
                raise Unsupported(
                    f"Forecast(depth={self.depth}): {type(denoiser).__name__} has depths from 0 to {limit}"
                )

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            cache = Cache(self.name, denoiser, self.when, self.order, self.damping)
            if self.when.watches:
                span_after_first(cache, patches)
            elif is_unet(denoiser):
                span_unet(cache, patches, self.depth)
            else:
                for blocks in lists(denoiser, type(self).__name__):
                    span_blocks(cache, patches, blocks)
            cache.attach(patches)

    def identity(self) -> "Forecast":
        return Forecast(when=Every(1), order=self.order, depth=self.depth, damping=self.damping)

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        return {"when": tuple(Every(n) for n in (2, 3, 4, 5)), "order": (1, 2), "damping": (0.0, 0.5)}
