"""Which of two calls is faster, and is it sure: interleaved in one process, with a confidence interval.

A machine's speed drifts by more than most techniques gain, so figures of two separate runs do not compare.
"""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Latency:
    """Seconds of each timed call."""

    seconds: tuple[float, ...]

    @property
    def p50_s(self) -> float:
        return float(np.quantile(self.seconds, 0.5))

    @property
    def p90_s(self) -> float:
        return float(np.quantile(self.seconds, 0.9))


@dataclass(frozen=True)
class Comparison:
    """`ratio` above 1: `b` is faster than `a`. `low` and `high` bound it with 95 % confidence."""

    a: Latency
    b: Latency
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.low:.3f}..{self.high:.3f}), p50 {self.a.p50_s:.4f} s and {self.b.p50_s:.4f} s"


def compare(a: Callable[[], Any], b: Callable[[], Any], *, repeats: int = 20, warm_up: int = 2) -> Comparison:
    """Times `repeats` pairs, alternating which goes first. The ratio is the median of the pairs' ratios."""
    for _ in range(warm_up):
        a()
        b()
    pairs = interleaved(a, b, repeats)
    low, high = interval([x / y for x, y in pairs])
    ratio = float(np.median([x / y for x, y in pairs]))
    return Comparison(Latency(tuple(x for x, _ in pairs)), Latency(tuple(y for _, y in pairs)), ratio, low, high)


def interleaved(a: Callable[[], Any], b: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    """Seconds of `repeats` pairs, alternating which goes first."""
    pairs: list[tuple[float, float]] = []
    for place in range(repeats):
        if place % 2:
            second = seconds(b)
            pairs.append((seconds(a), second))
        else:
            pairs.append((seconds(a), seconds(b)))
    return pairs


def seconds(call: Callable[[], Any]) -> float:
    """Of one call, to the end of the work that it queued on an accelerator."""
    start = time.perf_counter()
    call()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.synchronize()
    return time.perf_counter() - start


def interval(ratios: list[float], *, level: float = 0.95, resamples: int = 2000) -> tuple[float, float]:
    """Bootstrap interval of the median."""
    values = np.asarray(ratios)
    draws = np.random.default_rng(0).integers(0, len(values), (resamples, len(values)))
    low, high = np.quantile(np.median(values[draws], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def machine() -> dict[str, Any]:
    """What a figure must carry to be believed elsewhere."""
    return {
        "date": date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
        "commit": commit(),
    }


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def commit() -> str | None:
    """Of the checkout that this file is in, "-dirty" if it was changed since; None for an installed package."""
    git, here = shutil.which("git"), Path(__file__).resolve().parent
    if git is None or not (here.parent / "pyproject.toml").exists():
        return None
    command = [git, "-C", str(here), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
