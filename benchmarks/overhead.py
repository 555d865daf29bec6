"""What the bookkeeping itself costs: a pipeline whose denoiser returns its input, plain beside accelerated.

`python -m fewstep.benchmarks.overhead` prints both figures. Best of many, as nothing but the bookkeeping differs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import ConfigMixin, DDIMScheduler, DiffusionPipeline, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor

from ..accel.patches import Patches
from ..accel.pipeline import AcceleratedPipeline
from ..accel.recipe import Recipe
from ..accel.run import Run, entered


@dataclass(frozen=True)
class Overhead:
    """Seconds that the wrapping adds, best of `repeats`."""

    module_call_s: float
    pipeline_call_s: float
    repeats: int


class Owner:
    """Stands for an attachment."""

    pipe = None


class Echo(ModelMixin, ConfigMixin):
    """A denoiser that returns its input."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample


class EchoPipeline(DiffusionPipeline):
    """The smallest loop: the steps of a scheduler over an `Echo`."""

    def __init__(self, unet: Echo, scheduler: DDIMScheduler) -> None:
        super().__init__()
        self.register_modules(unet=unet, scheduler=scheduler)

    @torch.no_grad()
    def __call__(self, num_inference_steps: int = 1) -> Tensor:
        self.scheduler.set_timesteps(num_inference_steps)
        latents = torch.zeros(1, 1, 1, 1)
        for timestep in self.scheduler.timesteps:
            latents = self.scheduler.step(self.unet(latents, timestep), timestep, latents).prev_sample
        return latents


def measure(repeats: int = 200) -> Overhead:
    pipe = EchoPipeline(Echo(), DDIMScheduler())
    plain = best(pipe, repeats)
    fast: Any = AcceleratedPipeline(pipe, Recipe())
    return Overhead(module_overhead(repeats), best(fast, repeats) - plain, repeats)


def module_overhead(repeats: int) -> float:
    """One around on a module, inside its Run, over the bare module. Twenty calls a repeat: one is below the clock."""
    module, x, t = Echo(), torch.zeros(1), torch.zeros(1)
    plain = best(lambda: [module(x, t) for _ in range(20)], repeats)
    owner = Owner()
    Patches(owner).wrap_forward(module, passing)
    with entered(Run(owner)):
        return (best(lambda: [module(x, t) for _ in range(20)], repeats) - plain) / 20


def passing(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


def best(call: Callable[[], Any], repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    found = measure()
    print(f"wrapped module call {found.module_call_s * 1e6:.1f} us, pipeline call {found.pipeline_call_s * 1e3:.3f} ms")
