"""The transformer family: flow matching on latent tokens beside text tokens, saved as a stock `CogView4Pipeline`.

CogView4's class and not Flux's, SD3's or PixArt's: those put 512, 256 and 120 text tokens beside 64 image tokens unless
every call says otherwise (PixArt also refuses sizes without a resolution bin), this one rounds up to 16.

Loss: Lipman et al. 2023, arXiv:2210.02747. Noise levels: Esser et al. 2024, arXiv:2403.03206. Blocks start as the
identity: Peebles and Xie 2023, arXiv:2212.09748.
"""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import GlmConfig, GlmModel

from .base import BaseConfig, BaseTask
from .data import EmojiData

TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(BaseConfig):
    """`uniform_share`: part of the noise levels drawn evenly, so that the ends are trained too."""

    max_length: int = 16
    width: int = 256
    layers: int = 6
    heads: int = 4
    time_width: int = 128
    uniform_share: float = 0.2


class TransformerTask(BaseTask):
    def __init__(self, config: TransformerConfig, data: EmojiData) -> None:
        super().__init__(config, data)
        self.config = config
        self.tokenizer.padding_side = "left"  # as the pipeline pads: a caption is the same beside any other
        self.text_encoder: Any = GlmModel(text_config(config, len(self.tokenizer)))
        for unread in (self.text_encoder.layers[-1], self.text_encoder.norm):
            unread.requires_grad_(False)  # the pipeline reads hidden_states[-2]
        self.transformer: Any = CogView4Transformer2DModel(
            sample_size=self.latent_size,
            patch_size=1,
            in_channels=self.vae.config.latent_channels,
            out_channels=self.vae.config.latent_channels,
            num_layers=config.layers,
            num_attention_heads=config.heads,
            attention_head_dim=config.width // config.heads,
            text_embed_dim=config.text_width,
            time_embed_dim=config.time_width,
            condition_dim=32,
        )
        start_as_identity(self.transformer)

    @property
    def denoiser(self) -> Any:
        return self.transformer

    def errors(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        latents, noise = batch["latents"], batch["noise"]
        sigmas = noise_levels(batch["times"], self.config.uniform_share)
        level = sigmas.view(-1, 1, 1, 1)
        noisy, velocity = (1 - level) * latents + level * noise, noise - latents
        with sdpa_kernel(SDPBackend.MATH):  # on a CPU at 80 tokens the backward of the flash kernel costs twice as much
            predicted = self.predict(noisy, sigmas, batch["ids"])
        error = (predicted.float() - velocity).square().mean(dim=(1, 2, 3))
        return error, torch.ones_like(error)

    def predict(self, noisy: Tensor, sigmas: Tensor, ids: Tensor) -> Tensor:
        text = self.text_encoder(ids, output_hidden_states=True).hidden_states[-2]
        pixels = float(self.data.pixels.shape[-1])
        size = torch.full((len(noisy), 2), pixels, device=noisy.device)
        return self.transformer(noisy, text, sigmas * TRAIN_TIMESTEPS, size, size, torch.zeros_like(size)).sample

    def pipeline(self) -> Any:
        kind: Any = CogView4Pipeline
        return kind(
            vae=self.vae,
            text_encoder=self.text_encoder,
            tokenizer=self.tokenizer,
            transformer=self.transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=TRAIN_TIMESTEPS),
        )


def text_config(config: TransformerConfig, vocabulary_size: int) -> GlmConfig:
    """One layer more than is used: the pipeline reads the last but one hidden state."""
    return GlmConfig(
        vocab_size=vocabulary_size,
        hidden_size=config.text_width,
        intermediate_size=2 * config.text_width,
        num_hidden_layers=config.text_layers + 1,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        head_dim=config.text_width // config.heads,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def noise_levels(times: Tensor, uniform_share: float) -> Tensor:
    """Evenly distributed `times` to sigmas: logit-normal, but for a share that stays even."""
    normal = torch.special.ndtri(((times - uniform_share) / (1 - uniform_share)).clamp(1e-4, 1 - 1e-4))
    return torch.where(times < uniform_share, times / uniform_share, normal.sigmoid())


def start_as_identity(transformer: Any) -> None:
    """Zero gates, modulations and output: every block passes its input on."""
    blocks = [block.norm1.linear for block in transformer.transformer_blocks]
    for linear in (*blocks, transformer.norm_out.linear, transformer.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
