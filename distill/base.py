"""What every base model here shares: captions and cached latents in, a stock pipeline folder out."""

import copy
import json
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..accel.errors import InvalidConfig
from .autoencoder import load_vae
from .data import EmojiData
from .tokenizer import word_tokenizer
from .trainer import Task, seeded


@dataclass(frozen=True, kw_only=True)
class BaseConfig:
    """`vae` is a folder written by the autoencoder's training. Dropouts are shares of captions.

    `start`: a pipeline folder of the same family, on the same latents and captions, whose weights the training goes on
    from with a new optimizer; empty: from noise.
    """

    family: str
    vae: str
    start: str = ""
    text_width: int = 128
    text_layers: int = 2
    max_length: int = 24
    caption_dropout: float = 0.1
    style_dropout: float = 0.1
    tag_swap: float = 0.15


class BaseTask(Task):
    """A denoiser and its text encoder; a family builds them and its pipeline, and states the loss."""

    denoiser: Any
    text_encoder: Any

    def __init__(self, config: Any, data: EmojiData) -> None:
        super().__init__()
        self.data, self.captions = data, config
        self.frozen = {"vae": load_vae(config.vae)}  # in a dict: neither trained nor checkpointed
        self.tokenizer = word_tokenizer(vocabulary(data), config.max_length)
        self.latents = self.encode(data.train)

    @abstractmethod
    def errors(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Squared error of each example, (N,), and its weight in the loss."""

    @abstractmethod
    def pipeline(self) -> Any:
        """The stock pipeline of the modules as they are."""

    @property
    def vae(self) -> Any:
        return self.frozen["vae"]

    @property
    def latent_size(self) -> int:
        return self.data.pixels.shape[-1] // 2 ** (len(self.vae.config.block_out_channels) - 1)

    def start_from(self, folder: Path) -> None:
        """Tokenizer and weights of a saved pipeline. Raises `InvalidConfig` if there is none, or of other sizes."""
        index, kind = folder / "model_index.json", type(self.pipeline())
        if not index.is_file():
            raise InvalidConfig(f"model.start: no pipeline folder at {folder}; fewstep train writes one at OUT/final")
        if (found := json.loads(index.read_text())["_class_name"]) != kind.__name__:
            raise InvalidConfig(f"model.start: {folder} is a saved {found}, model.family wants a {kind.__name__}")
        saved = kind.from_pretrained(folder)
        self.tokenizer = saved.tokenizer  # the weights are of its ids
        for name, part in self.pipeline().components.items():
            if part in (self.denoiser, self.text_encoder):
                take_weights(part, getattr(saved, name), f"model.start: the {name} of {folder}")

    def __len__(self) -> int:
        return len(self.data.train)

    @torch.no_grad()
    def encode(self, indices: Any) -> Tensor:
        parts = self.data.images(indices).split(64)
        latents = torch.cat([self.vae.encode(x).latent_dist.mean for x in parts])
        return latents * self.vae.config.scaling_factor

    def batch(self, indices: Tensor, rng: torch.Generator) -> dict[str, Any]:
        """Latents, token ids, noise, and `times` in 0..1, one of each stratum."""
        latents = self.latents[indices]
        captions = [self.caption(int(self.data.train[i]), rng) for i in indices]
        times = (torch.arange(len(indices)) + torch.rand(len(indices), generator=rng)) / len(indices)
        noise = torch.randn(latents.shape, generator=rng)
        return {"latents": latents, "ids": self.tokenize(captions), "noise": noise, "times": times}

    def caption(self, index: int, rng: torch.Generator) -> str:
        """The caption, sometimes empty (for guidance), without its style, or with a tag in place of the label."""
        drop, swap, bare, pick = torch.rand(4, generator=rng).tolist()
        if drop < self.captions.caption_dropout:
            return ""
        label, style = self.data.caption(index).rsplit(", ", 1)
        tags = self.data.tags[self.data.concept[index]]
        if swap < self.captions.tag_swap and tags:
            label = tags[int(pick * len(tags))]
        return label if bare < self.captions.style_dropout else f"{label}, {style}"

    def tokenize(self, captions: list[str]) -> Tensor:
        return self.tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        error, weight = self.errors(batch)
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
            "times": (torch.arange(len(indices)) + 0.5) / len(indices),
        }
        loss, _ = self({k: v.to(self.denoiser.device) for k, v in batch.items()})
        return {"loss_held_out": loss.item()}

    def sample(self) -> Tensor:
        """Two rows of training captions, two of held-out ones; guidance 3, 25 steps."""
        captions = [self.data.caption(i) for i in (*self.data.train[::311][:16], *self.data.test[::37][:16])]
        pipe = self.pipeline()
        pipe.set_progress_bar_config(disable=True)
        rng = [seeded(i) for i in range(len(captions))]
        return pipe(captions, num_inference_steps=25, guidance_scale=3.0, generator=rng, output_type="pt").images

    def save(self, folder: Path) -> None:
        """A stock pipeline folder in float16."""
        pipe = self.pipeline()
        parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        pipe.register_modules(**{name: copy.deepcopy(part).half() for name, part in parts.items()})
        pipe.save_pretrained(folder)
        read_as_float32(folder / "text_encoder" / "config.json")


def take_weights(module: Any, source: Any, label: str) -> None:
    shapes = {n: tuple(v.shape) for n, v in module.state_dict().items()}
    found = {n: tuple(v.shape) for n, v in source.state_dict().items()}
    if different := sorted(n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n)):
        n = different[0]
        raise InvalidConfig(f"{label} has {n} of shape {found.get(n)}, [model] says {shapes.get(n)}: use its settings")
    module.load_state_dict(source.state_dict())


def read_as_float32(file: Path) -> None:
    """transformers takes the type of the weights, diffusers float32, and a pipeline of both fails at its first step."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": "float32"}, indent=2) + "\n")


def vocabulary(data: EmojiData) -> list[str]:
    """Every label, tag and style that a caption of these groups can name."""
    concepts = sorted(set(data.concept.tolist()))
    words = [data.labels[c] for c in concepts] + [t for c in concepts for t in data.tags[c]]
    return words + [f"{style} style" for style in data.styles]
