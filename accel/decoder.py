"""TinyDecoder: latents to pixels by a small distilled decoder.

*What* the pipeline's autoencoder decodes through a stock `AutoencoderTiny` that was trained for the same latents.
Encoding (image-to-image, inpainting), latents, configuration and everything before the decoder stay as they are.
*Pays when* steps are few, so that decoding is a good part of the call; pictures are large (the full decoder's memory is
most of the peak); previews at every step.
*Hurts when* fine texture or small text matters: it redraws them more softly. Frames of AnimateDiff, which are decoded
one by one, may flicker. Guidance is so strong that latents leave what a small decoder was trained on: see below.
*Exact?* no: another decoder. The latents are bit-equal.
*Settings* `weights`: "auto" takes the decoder for the pipeline's latents, which are told by their channels, scaling and
shift factor: the encoder fixes these, and a decoder that is trained on leaves them alone, so weights are not compared.
Ours for the emoji models is carried along; those for SD, SDXL, SD3 and Flux (Z-Image has Flux's latents) come from the
hub. Or a folder, for one of `fewstep train decoder`, or a hub id.
*Source* TAESD, Ollin Boer Bohan 2023, github.com/madebyollin/taesd.
*Measured* emoji-unet, one thread of a Zen 5 CPU, float32, interleaved, CPU time, 95 % intervals. Decoding: 10.9 and
4.9 ms a picture, 2.24 (2.22..2.27) times as fast, eight at once 2.65 (2.64..2.71); beside a channels-last full decoder
2.17 and 2.62. Whole calls with dpmpp_2m: 1.36 (1.33..1.41) at one step, 1.13 (1.12..1.14) at four, both unguided; 1.08
(1.04..1.11) at ten with guidance. 500 held-out pictures: 25.8 dB, the full decoder 26.4 dB, 30.9 dB between the two;
8 samples at 25 DDIM steps: 31.0 dB between the two without guidance, 30.1 (worst 25.5) at 3, 28.4 (worst 22.6) at 7.5.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor

from .errors import InvalidConfig, InvalidRecipe, Unsupported
from .patches import Patches
from .run import open_run
from .target import Target
from .technique import Claim, Fidelity, Stage, Technique
from .zoo.embedded import HERE, align

CARRIED = "emoji-decoder"
# Decoders by the channels, scaling factor and shift factor of the latents; all are 8 times smaller than the picture.
DECODERS: dict[tuple[int, float, float], str] = {
    (8, 0.6523697003858563, 0.0): CARRIED,  # one over the spread of its training latents: nobody else's
    (4, 0.18215, 0.0): "madebyollin/taesd",
    (4, 0.13025, 0.0): "madebyollin/taesdxl",
    (16, 1.5305, 0.0609): "madebyollin/taesd3",
    (16, 0.3611, 0.1159): "madebyollin/taef1",
}
FACTOR = 8


@dataclass(frozen=True, kw_only=True)
class TinyDecoder(Technique):
    """A small decoder in place of the autoencoder's own. `weights`: "auto", a folder, or a hub id.

    Raises `Unsupported` for autoencoders other than AutoencoderKL and for latents that `weights` does not decode, and
    `InvalidConfig` for weights that cannot be read.
    """

    name: ClassVar[str] = "tiny_decoder"
    stage: ClassVar[Stage] = Stage.WEIGHTS
    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim("decoding", "autoencoder")})

    weights: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.weights, (str, Path)) or not str(self.weights):
            raise InvalidRecipe(f"TinyDecoder: weights is {self.weights!r}; give auto, a folder, or a hub id")
        object.__setattr__(self, "weights", str(self.weights))

    def check(self, target: Target) -> None:
        vae = autoencoder(target)
        source = self.source(vae)
        if self.weights != "auto":  # those of the table are known to fit
            refuse_misfit(read(AutoencoderTiny.load_config, source), vae, self.weights)

    def apply(self, target: Target, patches: Patches) -> None:
        vae = autoencoder(target)
        small = Small(read(AutoencoderTiny.from_pretrained, self.source(vae)))

        def around(
            inner: Callable[..., Any], z: Tensor, return_dict: bool = True, generator: torch.Generator | None = None
        ) -> Any:
            open_run().count(self.name, "decoded", len(z))
            sample = small.decode(denoiser_scale(z, vae), vae)
            return DecoderOutput(sample=sample) if return_dict else (sample,)

        patches.wrap_method(vae, "decode", around)

    def identity(self) -> None:
        return None

    def source(self, vae: Any) -> str | Path:
        """Where the weights are. Raises `Unsupported` where "auto" knows none for these latents."""
        name = decoder_for(vae) if self.weights == "auto" else self.weights
        return HERE / CARRIED if name == CARRIED else name


def autoencoder(target: Target) -> Any:
    """The pipeline's AutoencoderKL. Video, wavelet and vector-quantised ones have other latents and other calls."""
    vae = getattr(target.need_pipeline("TinyDecoder"), "vae", None)
    if not isinstance(vae, AutoencoderKL):
        found = f"whose decoder is of {type(vae).__name__}" if vae is not None else "which has no autoencoder"
        raise Unsupported(f"TinyDecoder decodes the latents of an AutoencoderKL, not of {target.label}, {found}")
    if vae.config.get("latents_mean") is not None:
        raise Unsupported(f"TinyDecoder: the latents of {target.label} are scaled channel by channel: leave it out")
    return vae


def scale_and_shift(vae: Any) -> tuple[float, float]:
    return vae.config.scaling_factor, vae.config.get("shift_factor") or 0.0


def denoiser_scale(z: Tensor, vae: Any) -> Tensor:
    """Pipelines hand their autoencoder `latents / scaling_factor + shift_factor`; a small decoder takes `latents`."""
    scale, shift = scale_and_shift(vae)
    return (z - shift) * scale


def factor_of(vae: Any) -> int:
    return 2 ** (len(vae.config.block_out_channels) - 1)


def decoder_for(vae: Any) -> str:
    channels, (scale, shift) = vae.config.latent_channels, scale_and_shift(vae)
    for known, name in DECODERS.items():
        alike = math.isclose(scale, known[1], rel_tol=1e-6) and math.isclose(shift, known[2], abs_tol=1e-6)
        if channels == known[0] and alike and factor_of(vae) == FACTOR and vae.config.out_channels == 3:
            return name
    raise Unsupported(
        f"TinyDecoder knows no decoder for latents of {channels} channels, factor {factor_of(vae)}, scaling_factor "
        f"{scale} and shift_factor {shift}: make one with fewstep train decoder and name its folder in `weights`"
    )


def refuse_misfit(config: Any, vae: Any, name: str) -> None:
    """Raises `Unsupported` unless a decoder of this configuration takes these latents and gives such pictures."""
    factor = config["upsampling_scaling_factor"] ** (len(config["num_decoder_blocks"]) - 1)
    pairs = {
        "latent channels": (config["latent_channels"], vae.config.latent_channels),
        "times upsampling": (factor, factor_of(vae)),
        "picture channels": (config["out_channels"], vae.config.out_channels),
    }
    for what, (found, wanted) in pairs.items():
        if found != wanted:
            raise Unsupported(
                f"TinyDecoder: {name} has {found} {what}, the pipeline's autoencoder has {wanted}: take the decoder "
                "of its own latents, or make one with fewstep train decoder"
            )


def read(reader: Callable[..., Any], source: str | Path) -> Any:
    """What `reader` finds there. Raises `InvalidConfig` if that is no AutoencoderTiny."""
    try:
        found = reader(source)
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            f"no small decoder can be read from {source}: give a folder that holds an AutoencoderTiny, or a hub id "
            f"that can be reached ({str(error).splitlines()[0]})"
        ) from error
    kind = found.get("_class_name") if isinstance(found, dict) else type(found).__name__
    if kind != "AutoencoderTiny":
        raise InvalidConfig(f"{source} holds an object of class {kind}: TinyDecoder takes an AutoencoderTiny")
    return found


class Small:
    """The decoder as it was loaded, and a copy of it where the latents last were, in their precision.

    Calls come one at a time: the pipeline's decoding is locked.
    """

    def __init__(self, loaded: Any) -> None:
        align(loaded.requires_grad_(False).eval())
        self.loaded: Any = loaded
        self.placed: Any = loaded.to(memory_format=torch.channels_last)

    def decode(self, z: Tensor, vae: Any) -> Tensor:
        if (self.placed.device, self.placed.dtype) != (z.device, z.dtype):
            self.placed = copy.deepcopy(self.loaded).to(z.device, z.dtype)
        self.placed.use_slicing = vae.use_slicing
        self.placed.use_tiling = tiles(self.placed, z, vae)
        return self.placed.decode(z).sample.to(z.dtype)


def tiles(tiny: Any, z: Tensor, vae: Any) -> bool:
    """As the autoencoder was told; diffusers tiles a small one right for the usual factor alone."""
    large = max(z.shape[-2:]) > tiny.tile_latent_min_size
    return vae.use_tiling and large and factor_of(vae) == tiny.spatial_scale_factor
