"""DeepCache: the deep part of a UNet, computed at some steps and reused at the others.

*What* keeps the feature that the deep layers hand to the last up layers; between two computations of it only the layers
next to the picture run, on the current latents.
*Pays when* most of the UNet's work lies deep, and the latents change slowly: 20 steps or more.
*Hurts when* steps are few (a distilled student changes everything at each), and at the first steps of a call: let a
`Window` begin later.
*Exact?* no; `Every(1)` is.
*Settings* `when`: a policy, `Every(3)`; `depth`: how many down layers are computed always, 0 the fewest.
*Source* Ma et al. 2023, arXiv:2312.00858. Differs: decided for each row of the batch; evaluations are counted and not
looked up by timestep, so that samplers that evaluate a step twice, image-to-image and per-row timesteps are right.
*Measured* emoji-unet, 25 DDIM steps, guidance 3, one picture a call, one thread of a Zen 5 CPU, 7 interleaved pairs,
PSNR of 24 pictures (`fewstep bench peers`): `depth` 0 computing each second evaluation 1.58 (1.45..1.67) at 41.8 dB,
each third 1.99 (1.92..2.05) at 35.3 dB; `depth` 1 1.38 at 45.7 dB and 1.47 at 39.4 dB; `depth` 2 1.20 at 52.8 dB and
1.28 at 46.6 dB. Draws the pictures of DeepCache 0.1.1, 0.91 to 1.07 times as fast, all intervals around 1; on random
models of SD 1.5's and SDXL's shape 0.99 (0.97..1.02) and 1.00 (0.98..1.02) times, 2.75 and 3.05 times as fast as plain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..errors import Unsupported
from ..patches import Patches
from ..policy import EACH_THIRD, Every, Policy
from ..target import Target
from ..technique import Claim, Fidelity, Stage, Technique
from .reuse import Cache, need_bounded, need_rows
from .unet_span import deepest, span_unet


@dataclass(frozen=True, kw_only=True)
class DeepCache(Technique):
    """Reuses the deep part of a UNet."""

    name: ClassVar[str] = "deep_cache"
    stage: ClassVar[Stage] = Stage.CACHE
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("reuse of blocks")})

    when: Policy = EACH_THIRD
    depth: int = 0

    def check(self, target: Target) -> None:
        need_bounded(self.when, type(self).__name__)
        for denoiser in target.denoisers.values():
            limit = deepest(denoiser, type(self).__name__)
            if self.when.watches:
                raise Unsupported("DeepCache watches nothing: for a Dynamic policy use FirstBlockCache")
            if not 0 <= self.depth <= limit:
                raise Unsupported(f"DeepCache(depth={self.depth}): this UNet has depths from 0 to {limit}")
            need_rows(denoiser, type(self).__name__)

    def apply(self, target: Target, patches: Patches) -> None:
        for denoiser in target.denoisers.values():
            cache = Cache(self.name, denoiser, self.when)
            span_unet(cache, patches, self.depth)
            cache.attach(patches)

    def identity(self) -> "DeepCache":
        return DeepCache(when=Every(1), depth=self.depth)

    def space(self) -> Mapping[str, tuple[Any, ...]]:
        return {"when": tuple(Every(n) for n in (2, 3, 4, 5)), "depth": (0, 1, 2)}
