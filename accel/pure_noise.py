"""Sampling that starts where no signal is left (flows, zero terminal SNR: arXiv:2305.08891).

There the noise over the signal, which most solvers step in, is infinite; diffusers' classes put 4096, its flows 3000.
What their formulas make of such a number, seen beside the exact solution for Gaussian data, is put right here.
"""

from typing import Any

import torch
from diffusers import HeunDiscreteScheduler

from .errors import Unsupported
from .run import open_run

FLOOR = 2.0**-24  # the signal's share that stands for none, as in diffusers

# Their first step goes through sigma 300 and multiplies by 14 what the latents' dtype and fresh noise cost there.
WRONG = ("KDPM2",)
# These subtract numbers 4096 times as large as the picture: in half precision little of it is left.
CANCELLING = ("DEIS", "Heun", "KDPM2", "LMS", "PNDM", "SASolver")


def from_pure_noise(made: Any) -> Any:
    """`made`, a scheduler whose first level is `FLOOR` or zero, so that it gives right results; else `Unsupported`."""
    name = type(made).__name__
    if name.startswith(WRONG):
        raise Unsupported(f"{name} is wrong for a model that starts from pure noise: use heun, or euler_ancestral")
    if type(made) is HeunDiscreteScheduler:
        made.__class__ = HeunFromPureNoise
    vars(made)["steps_in_float32"] = name.startswith(CANCELLING)
    return made


class HeunFromPureNoise(HeunDiscreteScheduler):
    """Heun whose first step is Euler's.

    The trapezoid from sigma 4096 to 20 takes the mean of the slopes at its ends for the mean of all between, and errs
    by more than the picture. The slope over this step is its first one to about 1e-3, so Euler's step is right. The
    second evaluation stays in the schedule, which image-to-image cuts at even places, and leaves the sample as it is.
    """

    def step(self, model_output: Any, timestep: Any, sample: Any, return_dict: bool = True) -> Any:
        unchanged = self.step_index == 1 and not self.state_in_first_order
        output: Any = super().step(model_output, timestep, sample, return_dict)
        if not unchanged:
            return output
        if not return_dict:
            return (sample, *output[1:])
        output["prev_sample"] = sample
        return output


def in_float32(inner: Any, model_output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
    """An around for steps: in float32 where the scheduler asks for it. The latents keep their dtype."""
    if not getattr(open_run().scheduler, "steps_in_float32", False) or sample.dtype == torch.float32:
        return inner(model_output, timestep, sample, *args, **kwargs)
    output = inner(model_output.float(), timestep, sample.float(), *args, **kwargs)
    if isinstance(output, tuple):
        return (output[0].to(sample.dtype), *output[1:])
    output["prev_sample"] = output.prev_sample.to(sample.dtype)
    return output
