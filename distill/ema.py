"""Exponential moving average of trained weights, kept in float32 whatever the model's dtype.

A half-precision shadow with decay .999 never moves: the update is below its resolution.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Ema:
    """Shadow of `module`'s trainable parameters. Warm-up: decay at update t is min(decay, (1 + t) / (10 + t))."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.updates = decay, 0
        self.shadow = {n: p.detach().float().clone() for n, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        named = dict(module.named_parameters())
        shadows = list(self.shadow.values())
        torch._foreach_lerp_(shadows, [named[n].detach().float() for n in self.shadow], 1 - decay)

    @contextmanager
    def applied(self, module: nn.Module) -> Generator[None]:
        """Inside, `module` carries the averaged weights; afterwards its own again."""
        own = {n: p.detach().clone() for n, p in module.named_parameters() if n in self.shadow}
        assign(module, self.shadow)
        try:
            yield
        finally:
            assign(module, own)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in state["shadow"].items():
            self.shadow[name].copy_(value)


@torch.no_grad()
def assign(module: nn.Module, values: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if name in values:
            parameter.copy_(values[name])
