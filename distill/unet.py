"""The UNet family: v-prediction down to zero SNR, saved as a stock `StableDiffusionPipeline`.

Schedule: Lin et al. 2024, arXiv:2305.08891. Loss weight: Hang et al. 2023, arXiv:2303.09556, in a form that stays above
zero at zero SNR (see `loss_weight`).
"""

from dataclasses import dataclass
from typing import Any

from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from .base import BaseConfig, BaseTask
from .data import EmojiData


@dataclass(frozen=True, kw_only=True)
class UnetConfig(BaseConfig):
    widths: tuple[int, ...] = (96, 160)
    layers_per_block: int = 1
    heads: int = 4
    snr_cap: float = 5.0


class UnetTask(BaseTask):
    def __init__(self, config: UnetConfig, data: EmojiData) -> None:
        super().__init__(config, data)
        self.config = config
        self.text_encoder: Any = CLIPTextModel(text_config(config, len(self.tokenizer)))
        self.unet: Any = UNet2DConditionModel(
            sample_size=self.latent_size,
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

    @property
    def denoiser(self) -> Any:
        return self.unet

    def errors(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        latents, noise = batch["latents"], batch["noise"]
        timesteps = (batch["times"] * self.scheduler.config.num_train_timesteps).long()
        alphas = self.scheduler.alphas_cumprod.to(latents.device)[timesteps].view(-1, 1, 1, 1)
        noisy = alphas.sqrt() * latents + (1 - alphas).sqrt() * noise
        velocity = alphas.sqrt() * noise - (1 - alphas).sqrt() * latents
        text = self.text_encoder(batch["ids"]).last_hidden_state
        predicted = self.unet(noisy, timesteps, text).sample.float()
        error = (predicted - velocity).square().mean(dim=(1, 2, 3))
        return error, loss_weight(alphas.flatten(), self.config.snr_cap)

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


def text_config(config: UnetConfig, vocabulary_size: int) -> CLIPTextConfig:
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
