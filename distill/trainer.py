"""The loop shared by everything that is trained here.

A `Task` says what is trained and how wrong it is; the trainer owns devices, precision, the learning rate, the EMA,
checkpoints, logs and progress. Every random number of step k is drawn from a generator seeded by (seed, k), and the
order of the data by (seed, epoch): a resumed run is the run that was never stopped, bit for bit.
"""

import csv
import json
import shutil
import time
from abc import abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from ..accel.errors import InvalidConfig
from .ema import Ema


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of the loop. `batch_size` is per optimizer step over all processes."""

    out: str
    steps: int
    batch_size: int = 32
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    decay_steps: int = 0  # the last so many steps fall linearly to zero
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    ema_decay: float = 0.999
    mixed_precision: str = "bf16"
    seed: int = 0
    log_every: int = 50
    sample_every: int = 1000
    checkpoint_every: int = 500
    keep_checkpoints: int = 2

    def rate(self, step: int) -> float:
        """Warm-up, stable, decay: the factor on the learning rate at `step`."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (self.steps - step) / self.decay_steps if self.decay_steps else 1.0
        return min(warm, left, 1.0)


class Task(nn.Module):
    """What is trained: its parameters are those that require a gradient, its `forward` is the loss."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of training examples."""

    @abstractmethod
    def batch(self, indices: Tensor, rng: torch.Generator) -> dict[str, Any]:
        """The examples at `indices`, augmented with numbers from `rng` (on the CPU)."""

    @abstractmethod
    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and what to log of it."""

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Figures on held-out data, with the averaged weights in place."""

    @abstractmethod
    def sample(self) -> Tensor:
        """Pictures to look at, (N, 3, H, W) in 0..1."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes what was trained, with the averaged weights in place."""


def train(task: Task, config: TrainConfig, method: Any = None) -> Path:
    """Runs or resumes the training; returns the folder of the saved result, `config.out/final`."""
    run = Training(task, config, method)
    run.resume()
    with run.progress:
        bar = run.progress.add_task("training", total=config.steps, completed=run.step, note="")
        while run.step < config.steps:
            logs = run.advance()
            run.progress.update(bar, completed=run.step, note=f"loss {logs['loss']:.4f}")
    return run.finish()


class Training:
    """One run: the state that a checkpoint holds, and the steps that change it."""

    def __init__(self, task: Task, config: TrainConfig, method: Any) -> None:
        self.config, self.out = config, Path(config.out)
        self.accelerator = Accelerator(mixed_precision=config.mixed_precision)
        set_seed(config.seed)
        self.step, self.since = 0, time.perf_counter()
        optimizer = torch.optim.AdamW(
            [p for p in task.parameters() if p.requires_grad],
            config.learning_rate,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.model, self.optimizer = self.accelerator.prepare(task, optimizer)
        self.task: Any = self.accelerator.unwrap_model(self.model)
        self.ema = Ema(self.task, config.ema_decay)
        self.accelerator.register_for_checkpointing(self.ema, self)
        self.note_method({"train": asdict(config)} | ({"method": asdict(method)} if method else {}))
        self.board = tensorboard(self.out) if self.main else None
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), disable=not self.main)

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def note_method(self, settings: dict[str, Any]) -> None:
        """Keeps the settings beside the run and refuses to resume with another model or data."""
        file = self.out / "config.json"
        if file.exists():
            before = json.loads(file.read_text()).get("method")
            if before != json.loads(json.dumps(settings)).get("method"):
                raise InvalidConfig(
                    f"{self.out} holds a run with other [model] or [data] settings: use another train.out"
                )
        if self.main:
            self.out.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(settings, indent=1))

    def advance(self) -> dict[str, float]:
        """One optimizer step; logs, samples and checkpoints when they are due."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * self.config.rate(self.step)
        loss, logs = self.model(self.place(self.task.batch(self.indices(), self.generator())))
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} at step {self.step}: lower train.learning_rate, or resume")
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.task)
        self.step += 1
        values = {"loss": loss.item()} | {k: v.item() for k, v in logs.items()}
        self.record(values)
        return values

    def indices(self) -> Tensor:
        """This process's share of the step's examples: epochs are permutations, cut without a remainder."""
        count, size = len(self.task), self.config.batch_size
        places = torch.arange(self.step * size, (self.step + 1) * size)
        epochs = {int(e): self.permutation(int(e)) for e in (places // count).unique()}
        chosen = torch.stack([epochs[int(p // count)][p % count] for p in places])
        return chosen[self.accelerator.process_index :: self.accelerator.num_processes]

    def permutation(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.task), generator=seeded(self.config.seed, 1, epoch))

    def generator(self) -> torch.Generator:
        return seeded(self.config.seed, 2 + self.accelerator.process_index, self.step)

    def place(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {k: v.to(self.accelerator.device) for k, v in batch.items()}

    def record(self, values: dict[str, float]) -> None:
        if self.step % self.config.log_every == 0:
            rate = self.config.log_every * self.config.batch_size / (time.perf_counter() - self.since)
            self.since = time.perf_counter()
            self.log(values | {"images_per_s": rate, "lr": self.optimizer.param_groups[0]["lr"]})
        if self.step % self.config.sample_every == 0 or self.step == self.config.steps:
            self.look()
        if self.step % self.config.checkpoint_every == 0:
            self.checkpoint()

    def log(self, values: dict[str, float], image: Tensor | None = None) -> None:
        """A line of log.csv (long form: step, images, name, value), and the same to TensorBoard if it is installed."""
        if not self.main:
            return
        with (self.out / "log.csv").open("a", newline="") as file:
            rows = csv.writer(file)
            for name, value in values.items():
                rows.writerow([self.step, self.step * self.config.batch_size, name, f"{value:.6g}"])
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, self.step)
            if image is not None:
                self.board.add_image("samples", image, self.step)
            self.board.flush()

    @torch.no_grad()
    def look(self) -> None:
        """Validation figures and a grid of samples, both with the averaged weights."""
        with self.ema.applied(self.task):
            self.task.eval()
            values, grid = self.task.validate(), tile(self.task.sample())
            self.task.train()
        if self.main:
            folder = self.out / "samples"
            folder.mkdir(exist_ok=True)
            Image.fromarray((grid * 255).round().byte().permute(1, 2, 0).numpy()).save(folder / f"{self.step:07d}.png")
        self.log(values, grid)
        self.progress.console.print(f"step {self.step}: " + ", ".join(f"{k} {v:.4f}" for k, v in values.items()))

    def checkpoint(self) -> None:
        """All processes save; the folder appears whole, under its final name, or not at all."""
        folder = self.out / "checkpoints"
        target, partial = folder / f"{self.step:07d}", folder / "partial"
        self.accelerator.save_state(str(partial))
        if self.main:
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)
            for old in sorted(folder.glob("0*"))[: -self.config.keep_checkpoints]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        found = sorted((self.out / "checkpoints").glob("0*"))
        if found:
            self.accelerator.load_state(str(found[-1]))
            self.progress.console.print(f"resuming {self.out} at step {self.step}")

    def finish(self) -> Path:
        folder = self.out / "final"
        if self.main:
            with self.ema.applied(self.task):
                self.task.save(folder)
        return folder

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def seeded(*key: int) -> torch.Generator:
    """A CPU generator of its own for each key, independent of every other key."""
    mixed = 0
    for part in key:
        mixed = (mixed * 1_000_003 + part + 1) % (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


def tile(images: Tensor, columns: int = 8) -> Tensor:
    """(N, 3, H, W) to one picture (3, rows * H, columns * W); N is cut to whole rows."""
    images = images[: len(images) // columns * columns].clamp(0, 1).cpu().float()
    rows = images.unflatten(0, (-1, columns))
    return rows.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2)


def tensorboard(out: Path) -> Any:
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:  # the [train] extra; log.csv holds the same figures
        return None
    return SummaryWriter(str(out / "tensorboard"))
