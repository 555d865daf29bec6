"""Trains a latent text-to-image model: UNet and text encoder together, v-prediction down to zero SNR.

Saved as a stock `StableDiffusionPipeline` folder. Schedule: Lin et al. 2024, arXiv:2305.08891. Loss weight: Hang et al.
2023, arXiv:2303.09556, in a form that stays above zero at zero SNR (see `loss_weight`).
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from ..accel.errors import InvalidConfig
from .data import EmojiData
from .tokenizer import word_tokenizer
from .trainer import Task, seeded


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """`vae` is a folder written by the autoencoder's training. Dropouts are shares of captions."""

    vae: str
    widths: tuple[int, ...] = (96, 160)
    layers_per_block: int = 1
    heads: int = 4
    text_width: int = 128
    text_layers: int = 2
    max_length: int = 24
    caption_dropout: float = 0.1
    style_dropout: float = 0.1
    tag_swap: float = 0.15
    snr_cap: float = 5.0


class BaseTask(Task):
    def __init__(self, config: BaseConfig, data: EmojiData) -> None:
        super().__init__()
        self.config, self.data = config, data
        self.frozen = {"vae": load_vae(config.vae)}  # in a dict: neither trained nor checkpointed
        self.tokenizer = word_tokenizer(vocabulary(data), config.max_length)
        self.text_encoder: Any = CLIPTextModel(text_config(config, len(self.tokenizer)))
        self.unet: Any = UNet2DConditionModel(
            sample_size=data.pixels.shape[-1] // 2 ** (len(self.vae.config.block_out_channels) - 1),
            in_channels=self.vae.config.latent_channels,
            out_channels=self.vae.config.latent_channels,
            block_out_channels=config.widths,
            down_block_types=("CrossAttnDownBlock2D",) * len(config.widths),
            up_block_types=("CrossAttnUpBlock2D",) * len(config.widths),
            layers_per_block=config.layers_per_block,
            cross_attention_dim=config.text_width,
            attention_head_dim=config.heads,  # diffusers' name; it is the number of heads
        )
        self.scheduler: Any = zero_snr_scheduler()
        self.latents = self.encode(data.train)

    @property
    def vae(self) -> Any:
        return self.frozen["vae"]

    def __len__(self) -> int:
        return len(self.data.train)

    @torch.no_grad()
    def encode(self, indices: Any) -> Tensor:
        parts = self.data.images(indices).split(64)
        latents = torch.cat([self.vae.encode(x).latent_dist.mean for x in parts])
        return latents * self.vae.config.scaling_factor

    def batch(self, indices: Tensor, rng: torch.Generator) -> dict[str, Any]:
        latents = self.latents[indices]
        captions = [self.caption(int(self.data.train[i]), rng) for i in indices]
        strata = (torch.arange(len(indices)) + torch.rand(len(indices), generator=rng)) / len(indices)
        return {
            "latents": latents,
            "ids": self.tokenize(captions),
            "noise": torch.randn(latents.shape, generator=rng),
            "timesteps": (strata * self.scheduler.config.num_train_timesteps).long(),
        }

    def caption(self, index: int, rng: torch.Generator) -> str:
        """The caption, sometimes empty (for guidance), without its style, or with a tag in place of the label."""
        drop, swap, bare, pick = torch.rand(4, generator=rng).tolist()
        if drop < self.config.caption_dropout:
            return ""
        label, style = self.data.caption(index).rsplit(", ", 1)
        tags = self.data.tags[self.data.concept[index]]
        if swap < self.config.tag_swap and tags:
            label = tags[int(pick * len(tags))]
        return label if bare < self.config.style_dropout else f"{label}, {style}"

    def tokenize(self, captions: list[str]) -> Tensor:
        return self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        latents, noise, timesteps = batch["latents"], batch["noise"], batch["timesteps"]
        alphas = self.scheduler.alphas_cumprod.to(latents.device)[timesteps].view(-1, 1, 1, 1)
        noisy = alphas.sqrt() * latents + (1 - alphas).sqrt() * noise
        velocity = alphas.sqrt() * noise - (1 - alphas).sqrt() * latents
        text = self.text_encoder(batch["ids"]).last_hidden_state
        predicted = self.unet(noisy, timesteps, text).sample.float()
        error = (predicted - velocity).square().mean(dim=(1, 2, 3))
        weight = loss_weight(alphas.flatten(), self.config.snr_cap)
        return (weight * error).mean(), {"velocity_mse": error.mean().detach()}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Loss on held-out captions and pictures, the same noise each time."""
        indices, rng = self.data.test[:256], seeded(0)
        latents = self.encode(indices)
        batch = {
            "latents": latents,
            "ids": self.tokenize([self.data.caption(i) for i in indices]),
            "noise": torch.randn(latents.shape, generator=rng),
            "timesteps": torch.linspace(0, self.scheduler.config.num_train_timesteps - 1, len(indices)).long(),
        }
        device = self.unet.device
        loss, _ = self({k: v.to(device) for k, v in batch.items()})
        return {"loss_held_out": loss.item()}

    def sample(self) -> Tensor:
        """Two rows of training captions, two of held-out ones; guidance 3, 25 steps."""
        captions = [self.data.caption(i) for i in (*self.data.train[::311][:16], *self.data.test[::37][:16])]
        pipe = self.pipeline()
        pipe.set_progress_bar_config(disable=True)
        rng = [seeded(i) for i in range(len(captions))]
        return pipe(captions, num_inference_steps=25, guidance_scale=3.0, generator=rng, output_type="pt").images

    def pipeline(self) -> Any:
        kind: Any = StableDiffusionPipeline
        return kind(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            unet=self.unet,
            scheduler=self.scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )

    def save(self, folder: Path) -> None:
        """A stock pipeline folder in float16."""
        copies = {name: copy.deepcopy(module) for name, module in self.parts()}
        pipe = self.pipeline()
        pipe.register_modules(**{name: module.half() for name, module in copies.items()})
        pipe.save_pretrained(folder)
        read_as_float32(folder / "text_encoder" / "config.json")

    def parts(self) -> list[tuple[str, Any]]:
        return [("vae", self.vae), ("text_encoder", self.text_encoder), ("unet", self.unet)]


def read_as_float32(file: Path) -> None:
    """transformers takes the type of the weights, diffusers float32, and a pipeline of both fails at its first step."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def load_vae(folder: str) -> Any:
    if not (Path(folder) / "config.json").exists():
        raise InvalidConfig(f"model.vae: no autoencoder at {folder}; train one with fewstep train autoencoder")
    return AutoencoderKL.from_pretrained(folder).eval().requires_grad_(False)


def text_config(config: BaseConfig, vocabulary_size: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocabulary_size,
        hidden_size=config.text_width,
        intermediate_size=4 * config.text_width,
        num_hidden_layers=config.text_layers,
        num_attention_heads=config.heads,
        max_position_embeddings=config.max_length,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def zero_snr_scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,  # what the pipeline class expects; trailing spacing does not read it
        clip_sample=False,
    )


def loss_weight(alphas: Tensor, cap: float) -> Tensor:
    """Weight of the velocity's error: min(snr + 1, cap) / (snr + 1), which is min(1, cap (1 - alpha)).

    Min-SNR's own form, min(snr, cap) / (snr + 1), is zero at zero SNR: the first step of every sampler, the one that
    decides what the picture shows, would never be trained.
    """
    return (cap * (1 - alphas)).clamp(max=1.0)


def vocabulary(data: EmojiData) -> list[str]:
    """Every label, tag and style that a caption of these groups can name."""
    concepts = sorted(set(data.concept.tolist()))
    words = [data.labels[c] for c in concepts] + [t for c in concepts for t in data.tags[c]]
    return words + [f"{style} style" for style in data.styles]
