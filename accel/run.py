"""A Run: what one call of a pipeline, or one pass of the user's own loop, remembers.

Found through a context variable, so that threads do not meet; opened and closed around the call, so that the next
call starts clean however this one ended. Nothing per-call is kept anywhere else.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_current: ContextVar["Run | None"] = ContextVar("fewstep_run", default=None)


class Row(NamedTuple):
    """One row of the denoiser's batch. `sigma` is the noise level (noise over signal; flow: its share) at `step`."""

    request: int
    image: int
    branch: str
    step: int
    sigma: float


@dataclass
class Report:
    """What one call did. Times are of the host: on a GPU, work that was queued counts where it was waited for."""

    total_s: float = 0.0
    text_s: float = 0.0
    denoise_s: float = 0.0  # from the first denoiser call to the end of the last step
    decode_s: float = 0.0
    denoiser_calls: int = 0
    nfe: int = 0  # rows evaluated: a batched guidance pair is two
    peak_bytes: int = 0  # GPU: allocated during this call; CPU: the process's resident peak
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))  # technique -> what -> times
    notes: list[str] = field(default_factory=list)

    @property
    def recompiles(self) -> int:
        """Graphs compiled during this call: zero once every shape was seen."""
        return sum(counter["compiled"] for counter in self.counts.values())

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def __str__(self) -> str:
        stages = (
            f"{self.total_s:.3f} s (text {self.text_s:.3f}, denoise {self.denoise_s:.3f}, decode {self.decode_s:.3f})"
        )
        lines = [stages, f"{self.denoiser_calls} denoiser calls, {self.nfe} rows"]
        lines += [
            f"{name}: {', '.join(f'{v} {k}' for k, v in sorted(c.items()))}" for name, c in self.counts.items() if c
        ]
        return "\n".join(lines + [f"note: {text}" for text in self.notes])


class Run:
    """State of one call. `owner` is the attachment whose techniques act in it, None for those of `accelerate`."""

    def __init__(self, owner: Any = None, scheduler: Any = None) -> None:
        self.owner, self.scheduler = owner, scheduler
        self.loose: list[Any] = []  # attachments of `accelerate` that were called in this Run
        self.report = Report()
        self.step = 0  # scheduler steps completed: second-order samplers have two a timestep
        self.images: int | None = None  # rows of the latents, once a step has shown them
        self.context: str | None = None  # name of the denoiser's cache_context
        self.call_of_step = 0  # denoiser calls since the last step
        self.timestep: Any = None  # as the denoiser call in progress was given it
        self.closing: list[Callable[[Run], None]] = []  # what is to be said when the call is over
        self.describe: Callable[[], tuple[Row, ...]] = tuple
        self._rows: tuple[Row, ...] | None = None
        self._slots: dict[Any, Any] = {}
        self._sigmas: list[float] | None = None

    def slot(self, key: Any, factory: Callable[[], T]) -> T:
        """What `key` (a technique, a module, a tuple with row identities) remembers in this call."""
        if key not in self._slots:
            self._slots[key] = factory()
        return self._slots[key]

    def count(self, technique: str, what: str, times: int = 1) -> None:
        self.report.counts[technique][what] += times

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the denoiser call in progress; worked out when first asked for."""
        if self._rows is None:
            self._rows = self.describe()
        return self._rows

    def begin_call(self, describe: Callable[[], tuple[Row, ...]], timestep: Any = None) -> None:
        self.describe, self._rows, self.timestep = describe, None, timestep

    @contextmanager
    def narrowed(self, places: Sequence[int]) -> Generator[None]:
        """While the denoiser is called for some of its rows: those at `places`."""
        before = self.rows
        self._rows = tuple(before[i] for i in places)
        try:
            yield
        finally:
            self._rows = before

    def advance(self) -> None:
        """One scheduler step is complete."""
        self.step += 1
        self.call_of_step = 0

    @property
    def sigma(self) -> float:
        """Noise level of the current step; nan if the scheduler does not say, or past its last step."""
        if self._sigmas is None:
            self._sigmas = noise_levels(self.scheduler)
        if self._sigmas:
            return self._sigmas[self.step] if self.step < len(self._sigmas) else math.nan
        return noise_level(self.scheduler, self.timestep)

    def forget(self) -> None:
        """The call is over: its tensors are freed now, not when the garbage collector finds the Run."""
        for say in self.closing:
            say(self)
        self.closing.clear()
        self._slots.clear()
        self.describe, self._rows = tuple, None

    def reschedule(self) -> None:
        """The schedule was set anew: steps count from zero."""
        self.step, self.call_of_step, self._sigmas = 0, 0, None


def current_run() -> Run | None:
    """The innermost open Run of this thread or task."""
    return _current.get()


def open_run() -> Run:
    """The open Run, for arounds: they are only called inside one."""
    run = _current.get()
    if run is None:
        raise RuntimeError("no Run is open: call the AcceleratedPipeline, or open fewstep.run(scheduler)")
    return run


@contextmanager
def entered(run: Run) -> Generator[Run]:
    token = _current.set(run)
    start = time.perf_counter()
    try:
        yield run
    finally:
        run.report.total_s = time.perf_counter() - start
        _current.reset(token)


def noise_levels(scheduler: Any) -> list[float]:
    """The noise level of each step after `set_timesteps`, the begin index taken off; none if it has no such list."""
    timesteps, sigmas = getattr(scheduler, "timesteps", None), getattr(scheduler, "sigmas", None)
    if timesteps is None or sigmas is None or len(sigmas) < len(timesteps):
        return []
    start = getattr(scheduler, "begin_index", None) or 0
    return [float(s) for s in sigmas[start : len(timesteps)]]


def noise_level(scheduler: Any, timestep: Any) -> float:
    """The noise level at `timestep` of a scheduler that knows alphas and no sigmas: DDIM, DDPM, PNDM, LCM.

    Some of them have no begin index either, so under image-to-image strength only the timestep says where a call is.
    """
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or timestep is None:
        return math.nan
    alpha = float(alphas[int(torch.as_tensor(timestep).flatten()[0])])
    return math.sqrt((1 - alpha) / alpha) if alpha > 0 else math.inf


def rows_of_branches(run: Run, branches: Sequence[str], images: int) -> tuple[Row, ...]:
    """Blocks of `images` rows, one block a branch, in the batch's order."""
    return tuple(Row(0, image, branch, run.step, run.sigma) for branch in branches for image in range(images))
