"""A run that was cut and resumed is the run that was never cut, bit for bit; the figures it logs are those it had."""

import csv
import os
import subprocess
import sys

import pytest
import torch

from fewstep.accel.errors import InvalidConfig
from fewstep.distill.trainer import TrainConfig, tile, train

ENVIRONMENT = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def weights(folder):
    return torch.load(folder / "line.pt")


def test_it_learns_and_leaves_log_samples_and_result(line, config, tmp_path):
    task = line()
    final = train(task, config(steps=200, ema_decay=0.9))
    assert abs(weights(final)["weight"].item() - 3) < 0.1 and abs(weights(final)["bias"].item() - 1) < 0.1
    with (tmp_path / "run" / "log.csv").open() as file:
        rows = list(csv.reader(file))
    assert {r[2] for r in rows} == {"loss", "error", "images_per_s", "lr", "slope"}
    assert rows[0][:2] == ["5", "40"]
    assert (tmp_path / "run" / "samples" / "0000200.png").exists()
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["0000195", "0000200"]


def test_a_resumed_run_is_the_run_that_was_never_cut(line, config, tmp_path):
    whole = weights(train(line(), config(out=str(tmp_path / "whole"))))
    cut = line()
    cut.batch = interrupting(cut.batch, after=13)
    with pytest.raises(KeyboardInterrupt):
        train(cut, config(out=str(tmp_path / "cut")))
    torch.rand(7)  # the process that resumes has drawn other numbers
    resumed = weights(train(line(), config(out=str(tmp_path / "cut"))))
    assert all(torch.equal(whole[k], resumed[k]) for k in whole)


def interrupting(batch, after):
    calls = []

    def cut(indices, rng):
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return batch(indices, rng)

    return cut


def test_resuming_with_fewer_steps_decays_early(line, config):
    train(line(), config(steps=15))
    rates = [config(steps=20, decay_steps=10).rate(step) for step in (0, 1, 9, 10, 15, 19)]
    assert rates == [0.5, 1.0, 1.0, 1.0, 0.5, 0.1]


def test_every_example_is_seen_once_an_epoch(line, config):
    task = line()
    train(task, config(steps=25))  # 25 * 8 = 4 epochs of 50
    seen = [i for batch in task.seen for i in batch]
    for epoch in range(4):
        assert sorted(seen[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
    assert seen[:50] != seen[50:100]


def test_the_result_carries_the_averaged_weights(line, config):
    task = line()
    final = train(task, config(ema_decay=0.99))
    assert weights(final)["weight"].item() != task.model.weight.item()


def test_another_model_in_the_same_folder_is_refused(line, config):
    train(line(), config(), method=TrainConfig(out="a", steps=1))
    with pytest.raises(InvalidConfig, match=r"another train\.out"):
        train(line(), config(), method=TrainConfig(out="a", steps=2))


def test_a_loss_that_is_not_finite_stops_with_words(line, config):
    task = line()
    with torch.no_grad():
        task.model.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"lower train\.learning_rate"):
        train(task, config())


def test_tiles():
    images = torch.arange(16.0).view(16, 1, 1, 1).expand(16, 3, 2, 2) / 16
    grid = tile(images, columns=8)
    assert grid.shape == (3, 4, 16)
    assert grid[0, 0, 2] == 1 / 16 and grid[0, 2, 0] == 8 / 16


def test_two_processes_equal_one(tmp_path, config, line):
    """Half of the batch each: the same weights to rounding, with gloo on the CPU."""
    script = tmp_path / "two.py"
    script.write_text(
        f"""
import sys; sys.path.insert(0, {str(tmp_path.parent)!r})
import importlib.util
spec = importlib.util.spec_from_file_location("toy", {str(__file__).replace("test_trainer", "conftest")!r})
toy = importlib.util.module_from_spec(spec); spec.loader.exec_module(toy)
from fewstep.distill.trainer import TrainConfig, train
config = TrainConfig(out={str(tmp_path / "pair")!r}, steps=10, batch_size=8, learning_rate=0.1, warmup_steps=2,
                     mixed_precision="no", checkpoint_every=5)
class Quiet(toy.Line):
    def batch(self, indices, rng):
        x = self.x[indices]
        return {{"x": x, "y": 3 * x + 1}}
train(Quiet(), config)
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]

    class Quiet(line):
        def batch(self, indices, rng):
            x = self.x[indices]
            return {"x": x, "y": 3 * x + 1}

    alone = weights(train(Quiet(), config(steps=10)))
    pair = weights(tmp_path / "pair" / "final")
    for name in alone:
        torch.testing.assert_close(pair[name], alone[name], rtol=1e-5, atol=1e-6)
