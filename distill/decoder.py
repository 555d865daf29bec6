"""Distils the decoder of an AutoencoderKL into a small one, saved as a stock `AutoencoderTiny`.

After Ollin Boer Bohan's TAESD (github.com/madebyollin/taesd): plain convolutions and ReLU, no attention, no
normalisation; the same latents, which the encoder left as it is keeps giving. Unlike there, the loss is that of the
autoencoder itself, against real pictures, and normalisation helps while training: batch statistics of a trained
network are constants, and constants fold into the convolution before them (RepVGG, arXiv:2101.03697).
"""

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderTiny
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.optim.swa_utils import update_bn

from ..accel.errors import InvalidConfig
from .autoencoder import edges, load_vae
from .base import take_weights
from .data import EmojiData
from .trainer import Task

STATISTICS = 2048  # training pictures that the statistics of the averaged weights are taken over


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """`vae`: the autoencoder's folder. `blocks`: residual blocks at each resolution, from the latents' up.

    All resolutions have `width` channels, as AutoencoderTiny wants it, so blocks cost 4 times more at each.
    `enlarged`: the share of latents that are made up to half as large again, as guidance makes them; of these there is
    no picture but what the full decoder draws.
    `start`: an AutoencoderTiny folder of the same shape, whose decoder the training goes on from.
    """

    vae: str
    start: str = ""
    width: int = 48
    blocks: tuple[int, ...] = (4, 4, 1, 0)
    edge_weight: float = 1.0
    enlarged: float = 0.2
    flip: bool = True

    def __post_init__(self) -> None:
        if self.width < 1 or min(self.blocks, default=0) < 0:
            raise InvalidConfig(f"model.width must be 1 or more and model.blocks 0 or more each; got {self}")


class DecoderTask(Task):
    def __init__(self, config: DecoderConfig, data: EmojiData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.frozen = {"vae": load_vae(config.vae)}  # in a dict: neither trained nor checkpointed
        self.tiny: Any = untrained(config, self.vae.config)
        orientations = (False, True) if config.flip else (False,)
        self.latents = torch.stack([self.encode(data.train, flip=flip) for flip in orientations])
        if config.start:
            unfold(self.tiny.decoder, self.probe)

    @property
    def vae(self) -> Any:
        return self.frozen["vae"]

    def __len__(self) -> int:
        return len(self.data.train)

    @property
    def probe(self) -> Tensor:
        """The latents that statistics are taken over."""
        return self.latents[0, :: max(1, len(self) // STATISTICS)]

    @torch.no_grad()
    def encode(self, indices: Any, flip: bool = False) -> Tensor:
        """Latents as a denoiser sees them: shifted and scaled."""
        parts = self.data.images(indices).split(64)
        latents = torch.cat([self.vae.encode(x.flip(-1) if flip else x).latent_dist.mean for x in parts])
        return (latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    def batch(self, indices: Tensor, rng: torch.Generator) -> dict[str, Any]:
        images = self.data.images(torch.from_numpy(self.data.train)[indices])
        side = torch.randint(len(self.latents), (len(images),), generator=rng)
        flipped = torch.where(side.bool()[:, None, None, None], images.flip(-1), images)
        chosen, size = torch.rand(2, len(images), generator=rng)
        scale = torch.where(chosen < self.config.enlarged, 1 + size / 2, torch.ones(()))
        return {"images": flipped, "latents": self.latents[side, indices], "scale": scale}

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        latents, wanted = batch["latents"] * batch["scale"][:, None, None, None], batch["images"].clone()
        larger = batch["scale"] > 1
        if larger.any():
            wanted[larger] = self.decode_full(latents[larger]).float()
        difference = self.tiny.decoder(latents).float() - wanted
        pixel, edge = difference.abs().mean(), edges(difference)
        return pixel + self.config.edge_weight * edge, {"l1": pixel.detach(), "edge": edge.detach()}

    @cached_property
    def held_out(self) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures, their latents, and what the full decoder makes of these."""
        indices = self.data.test[:256]
        latents = self.encode(indices)
        return self.data.images(indices), latents, self.decode_full(latents)

    @torch.no_grad()
    def decode_full(self, latents: Tensor) -> Tensor:
        """What the autoencoder itself makes of latents as a denoiser has them."""
        config = self.vae.config
        unscaled = latents / config.scaling_factor + (config.shift_factor or 0.0)
        return torch.cat([self.vae.decode(z).sample for z in unscaled.split(32)])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        device = next(self.tiny.parameters()).device
        return torch.cat([self.tiny.decoder(z.to(device)).float().cpu() for z in latents.split(32)])

    def validate(self) -> dict[str, float]:
        images, latents, full = self.held_out
        self.measure()
        return {"psnr_held_out": psnr(self.decode(latents), images), "psnr_full_decoder": psnr(full, images)}

    def sample(self) -> Tensor:
        """Held-out pictures, below each what the full decoder makes of it, and below that the small one."""
        images, latents, full = (part[:32] for part in self.held_out)
        rows = zip(images.split(8), full.split(8), self.decode(latents).split(8), strict=True)
        return torch.cat([row for group in rows for row in group]) / 2 + 0.5

    def measure(self) -> None:
        """Batch statistics of the weights in place: those gathered in training are of weights that have moved on."""
        update_bn(self.probe.split(64), self.tiny.decoder, next(self.tiny.parameters()).device)

    def save(self, folder: Path) -> None:
        self.measure()
        stock = copy.deepcopy(self.tiny).cpu().eval().to(memory_format=torch.contiguous_format)
        fold(stock)
        stock.half().save_pretrained(folder / "decoder")


class Normed(nn.Sequential):
    """A convolution and its batch normalisation."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__(conv, nn.BatchNorm2d(conv.out_channels))


def untrained(config: DecoderConfig, vae: Any) -> Any:
    """An AutoencoderTiny for these latents, its decoder normalised; its encoder, which stock loading wants, is zero."""
    depth = len(vae.block_out_channels)
    if len(config.blocks) != depth or vae.latents_mean is not None:
        raise InvalidConfig(
            f"model.blocks must name {depth} resolutions for {config.vae}, whose latents must be scaled by one factor; "
            f"got {config.blocks}"
        )
    kind: Any = AutoencoderTiny  # diffusers' annotations are narrower than what it takes
    tiny = kind(
        in_channels=vae.in_channels,
        out_channels=vae.out_channels,
        latent_channels=vae.latent_channels,
        encoder_block_out_channels=(1,) * depth,
        num_encoder_blocks=(0,) * depth,
        decoder_block_out_channels=(config.width,) * depth,
        num_decoder_blocks=config.blocks,
    )
    for parameter in tiny.encoder.requires_grad_(False).parameters():
        parameter.zero_()
    if config.start:
        take_decoder(tiny.decoder, Path(config.start))
    picture = tiny.decoder.layers[-1]
    normalise(tiny.decoder)
    tiny.decoder.layers[-1] = picture
    return tiny.to(memory_format=torch.channels_last)  # 1.6 times as fast to train on a CPU


def take_decoder(decoder: nn.Module, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise InvalidConfig(f"model.start: no AutoencoderTiny at {folder}; trainings leave one at OUT/final/decoder")
    saved: Any = AutoencoderTiny.from_pretrained(folder, torch_dtype=torch.float32)
    take_weights(decoder, saved.decoder, f"model.start: the decoder of {folder}")


def normalise(module: nn.Module) -> None:
    """After every convolution with a bias to fold into; upsampling ones have none, and the last one makes the picture.

    The last of a block starts at zero, so that every block starts as nothing (Goyal et al. 2017, arXiv:1706.02677).
    """
    for name, part in list(module.named_children()):
        if isinstance(part, nn.Conv2d) and part.bias is not None:
            setattr(module, name, Normed(part))
        else:
            normalise(part)
    if hasattr(module, "fuse"):
        nn.init.zeros_(module.get_submodule("conv.4.1").get_parameter("weight"))


@torch.no_grad()
def unfold(decoder: nn.Module, latents: Tensor) -> None:
    """Normalisations that change nothing yet: each gives back the mean and spread that it takes from `latents`."""

    def undo(norm: Any, args: tuple[Tensor]) -> None:
        norm.bias.copy_(args[0].mean(dim=(0, 2, 3)))
        norm.weight.copy_((args[0].var(dim=(0, 2, 3), correction=0) + norm.eps).sqrt())

    norms = [part for part in decoder.modules() if isinstance(part, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(undo) for norm in norms]
    decoder.train()(latents)
    for hook in hooks:
        hook.remove()


def fold(module: nn.Module) -> None:
    """Each normalisation, as it is in evaluation, into the convolution before it."""
    for name, part in list(module.named_children()):
        if isinstance(part, Normed):
            conv: Any = part[0]
            norm: Any = part[1]
            setattr(module, name, fuse_conv_bn_eval(conv, norm))
        else:
            fold(part)


def psnr(found: Tensor, images: Tensor) -> float:
    """Mean over pictures in -1..1, in dB."""
    error = (found.clamp(-1, 1) - images).square().mean(dim=(1, 2, 3)) / 4
    return (-10 * error.log10()).mean().item()
