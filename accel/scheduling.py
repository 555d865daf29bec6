"""The call's own scheduler: a copy whose class counts steps for the Run.

A subclass and not a closure on the instance: pipelines deep-copy their scheduler in the middle of a call, and a
closure would go on stepping the original. Only the scheduler that the Run knows advances it.
"""

import copy
import functools
from typing import Any

from .run import current_run


@functools.cache
def stepping(cls: type) -> type:
    """`cls` with `step` and `set_timesteps` that tell the Run. Name and signatures stay: pipelines read both."""

    @functools.wraps(cls.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = current_run()
        if run is None or run.scheduler is not self:
            return cls.step(self, *args, **kwargs)
        inner = functools.partial(cls.step, self)
        for owner in [run.owner] if run.owner is not None else run.loose:
            for around in owner.patches.steps:
                inner = functools.partial(around, inner)
        output = inner(*args, **kwargs)
        sample = args[2] if len(args) > 2 else kwargs.get("sample")
        run.images = len(sample) if sample is not None else run.images
        run.advance()
        return output

    @functools.wraps(cls.set_timesteps)
    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = cls.set_timesteps(self, *args, **kwargs)
        run = current_run()
        if run is not None and self in run.slot("schedulers", list):
            run.scheduler = self
            run.reschedule()
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), names | {"step": step, "set_timesteps": set_timesteps, "plain_class": cls})


def call_copy(scheduler: Any) -> Any:
    """A copy for one call; the original is not touched by it."""
    copied = copy.deepcopy(scheduler)
    copied.__class__ = stepping(getattr(scheduler, "plain_class", type(scheduler)))
    return copied


SCHEDULE = ("timesteps", "sigmas", "num_inference_steps")


def publish(copied: Any, original: Any) -> None:
    """Leaves on the pipeline's scheduler what users read after a call."""
    for name in SCHEDULE:
        if name in vars(copied):
            setattr(original, name, getattr(copied, name))
