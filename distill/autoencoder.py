"""Trains an AutoencoderKL on pictures: L1, L1 of image gradients, and a small KL term."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from ..accel.errors import InvalidConfig
from .data import EmojiData
from .trainer import Task


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """Shape of the model and weights of the loss terms; the factor is 2 ** (len(widths) - 1).

    `encoder`: a trained autoencoder's folder. Its encoder is kept as it is, so that every model trained on its latents
    stays valid, its decoder is trained on, and its own shape counts.
    """

    encoder: str = ""
    widths: tuple[int, ...] = (24, 48, 96, 128)
    latent_channels: int = 8
    layers_per_block: int = 1
    norm_groups: int = 8
    edge_weight: float = 1.0
    kl_weight: float = 1e-6
    flip: bool = True


class AutoencoderTask(Task):
    def __init__(self, config: AutoencoderConfig, data: EmojiData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.vae: Any = decoder_of(config.encoder) if config.encoder else untrained(config, data.pixels.shape[-1])

    def __len__(self) -> int:
        return len(self.data.train)

    def batch(self, indices: Tensor, rng: torch.Generator) -> dict[str, Any]:
        images = self.data.images(torch.from_numpy(self.data.train)[indices])
        if self.config.flip:
            flipped = torch.rand(len(images), generator=rng) < 0.5
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        shape = (len(images), self.vae.config.latent_channels, *(s // self.factor for s in images.shape[-2:]))
        return {"images": images, "noise": torch.randn(shape, generator=rng)}

    @property
    def factor(self) -> int:
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        images = batch["images"]
        with torch.set_grad_enabled(not self.config.encoder and torch.is_grad_enabled()):
            posterior = self.vae.encode(images).latent_dist
        decoded = self.vae.decode(posterior.mean + posterior.std * batch["noise"]).sample.float()
        pixel, edge = (decoded - images).abs().mean(), edges(decoded - images)
        kl = posterior.kl().float().mean()
        loss = pixel + self.config.edge_weight * edge + self.config.kl_weight * kl
        return loss, {"l1": pixel.detach(), "edge": edge.detach(), "kl": kl.detach()}

    def validate(self) -> dict[str, float]:
        images = self.data.images(self.data.test[:256])
        error = (self.reconstruct(images).clamp(-1, 1) - images).square().mean(dim=(1, 2, 3)) / 4
        return {"psnr_held_out": (-10 * error.log10()).mean().item()}

    def sample(self) -> Tensor:
        """Rows of held-out pictures, each above its reconstruction."""
        images = self.data.images(self.data.test[:32])
        pairs = zip(images.split(8), self.reconstruct(images).split(8), strict=True)
        return torch.cat([row for pair in pairs for row in pair]) / 2 + 0.5

    @torch.no_grad()
    def reconstruct(self, images: Tensor) -> Tensor:
        device = self.vae.device
        parts = [self.vae.decode(self.vae.encode(x.to(device)).latent_dist.mean).sample for x in images.split(32)]
        return torch.cat(parts).float().cpu()

    @torch.no_grad()
    def save(self, folder: Path) -> None:
        """The autoencoder with the scaling factor that gives its training latents unit variance."""
        if not self.config.encoder:
            parts = self.data.images(self.data.train).split(64)
            latents = torch.cat([self.vae.encode(x.to(self.vae.device)).latent_dist.mean for x in parts])
            self.vae.register_to_config(scaling_factor=1 / latents.float().std().item())
        self.vae.save_pretrained(folder / "vae")


def untrained(config: AutoencoderConfig, pixels: int) -> Any:
    depth = len(config.widths)
    kind: Any = AutoencoderKL  # diffusers' annotations are narrower than what it takes
    return kind(
        down_block_types=("DownEncoderBlock2D",) * depth,
        up_block_types=("UpDecoderBlock2D",) * depth,
        block_out_channels=config.widths,
        layers_per_block=config.layers_per_block,
        latent_channels=config.latent_channels,
        norm_num_groups=config.norm_groups,
        sample_size=pixels,
    )


def decoder_of(folder: str) -> Any:
    """A trained autoencoder of which only the decoder is trained on."""
    vae = load_vae(folder).train()
    vae.decoder.requires_grad_(True)
    return vae


def load_vae(folder: str) -> Any:
    if not (Path(folder) / "config.json").exists():
        raise InvalidConfig(f"no autoencoder at {folder}; train one with fewstep train autoencoder")
    return AutoencoderKL.from_pretrained(folder).eval().requires_grad_(False)


def edges(difference: Tensor) -> Tensor:
    """Mean absolute difference of neighbouring pixels' errors, across and down."""
    across, down = difference.diff(dim=-1).abs().mean(), difference.diff(dim=-2).abs().mean()
    return across + down
