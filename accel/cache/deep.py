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
PSNR of 16 pictures: `depth` 0 computing each second evaluation 1.55 (1.52..1.59) at 42.6 dB, each third 1.96
(1.93..2.03) at 36.2 dB; `depth` 1 1.33 at 46.4 dB and 1.48 at 40.8 dB; `depth` 2 1.16 at 54.0 dB and 1.27 at 48.0 dB.
Equals DeepCache 0.1.1 at every depth. At equal pictures 0.96 to 1.01 times as fast as that package, all intervals
around 1.
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
