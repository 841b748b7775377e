"""How a run ends that is told to stop, or that leaves by itself: the exit status, and what the record says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import warm
from processes import left_behind, working_in
from user_project import OVERRIDES, environment, make_directory, record
from warm import Warm

_LEAVING = """
import os
import pathlib
import sys
import time

import lightning.pytorch as pl
import torch
from mine import model
from torch import nn


class Leaves(nn.Module):
    '''Ends its process without an error in the middle of the run, as a script's early exit does.'''

    def __init__(self, how):
        super().__init__()
        self.how, self.passes = how, 0

    def forward(self, x):
        self.passes += self.training and os.environ.get("RANK") is not None
        if self.passes > 50:
            print("enough", flush=True)
            sys.exit(0) if self.how == "sys.exit" else os._exit(0)
        return x


def leaving(how):
    return nn.Sequential(*model(), Leaves(how))


def slow_to_build(seconds, only_in_ranks):
    if not only_in_ranks or "RANK" in os.environ:
        pathlib.Path("building").touch()
        time.sleep(seconds)
    return model()


class LongEnd(pl.LightningModule):
    '''Has something to do after the last step.'''

    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_fit_end(self):
        pathlib.Path("fitted").touch()
        time.sleep(1)
"""


def command(directory: Path, *overrides: str) -> tuple[list[str], dict[str, str]]:
    make_directory(directory)
    (directory / "leaving.py").write_text(_LEAVING, encoding="utf-8")
    named = {word.split("=")[0].lstrip("+") for word in overrides}
    named |= {"loss.target"} if any("LongEnd" in word for word in overrides) else set()  # it has its own loss
    usual = [word for word in OVERRIDES if word.split("=")[0] not in named]
    return [sys.executable, "-m", "runner", "train", *usual, "logger=none", *overrides], environment(directory)


def start(directory: Path, *overrides: str) -> Warm:
    line, env = command(directory, *overrides)
    return Warm(line, cwd=directory, env=env, stderr=subprocess.PIPE, text=True)


def wait_until(ready: Callable[[], bool], seconds: float = 1500.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def rank_in(directory: Path, rank: int) -> int:
    """The process of a forked rank, which carries its number as its name."""
    named = {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in working_in(directory)}
    return named[f"rank {rank}"]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("how", "layout"), [("sys.exit", []), ("os._exit", ["parallelism.pipeline=2", "schedule.microbatches=2"])]
)
def test_code_that_leaves_early_has_not_done_the_work(tmp_path: Path, how: str, layout: list[str]) -> None:
    """An exit with status 0 in the user's own layers is a failure; in a pipeline, of the rank that left."""
    line, env = command(tmp_path, "model.target=leaving:leaving", f"model.kwargs.how={how}", *layout,
                        "trainer.max_steps=100")  # fmt: skip
    done = warm.run(line, cwd=tmp_path, env=env)
    assert done.returncode == 1, done.stderr
    made = record(tmp_path / "run")
    assert made["status"] == "failed"
    assert 0 < made["steps"] == len(made["loss"]) < 100
    left = "failed: SystemExit: 0 (leaving.py:" if how == "sys.exit" else "ended with status 0 before its work was"
    assert f"rank {1 if layout else 0} (stage" in made["reason"]
    assert left in made["reason"]
    assert left_behind(tmp_path) == []


@pytest.mark.costly
def test_sigterm_to_one_rank_preempts_the_run(tmp_path: Path) -> None:
    """As a scheduler does that ends a machine's processes: all ranks save, and the command says that it can go on.

    The signal brings no validation of its own.
    """
    layout = ("parallelism.data=2", "schedule=gpipe", "schedule.microbatches=2")
    started = start(tmp_path, *layout, "trainer.max_steps=1000000")
    steps = tmp_path / "run" / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size > 0)
    os.kill(rank_in(tmp_path, 1), signal.SIGTERM)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 75, told
    made = record(tmp_path / "run")
    assert (made["status"], made["val_loss"]) == ("preempted", [])
    assert f"stopped by SIGTERM, saved after step {made['steps']}; resume=auto continues" in told
    assert made["reason"] == f"stopped by SIGTERM, saved after step {made['steps']}; resume=auto continues"
    assert (tmp_path / "run" / "checkpoints" / f"step-{made['steps']}.ckpt").exists()
    assert left_behind(tmp_path) == []


@pytest.mark.costly
@pytest.mark.parametrize(("number", "only_in_ranks"), [(signal.SIGTERM, "false"), (signal.SIGUSR1, "true")])
def test_a_job_that_is_preempted_while_it_starts_can_be_queued_again(
    tmp_path: Path, number: signal.Signals, only_in_ranks: str
) -> None:
    """While the model is built for the plan nothing has been written; while the ranks build it there is a record."""
    started = start(
        tmp_path, "model.target=leaving:slow_to_build", "model.kwargs.seconds=600",
        f"model.kwargs.only_in_ranks={only_in_ranks}", "parallelism.pipeline=2", "schedule.microbatches=2",
    )  # fmt: skip
    wait_until((tmp_path / "building").exists)
    started.send_signal(number)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 75, told
    assert "Traceback" not in told
    assert f"stopped by {number.name}" in told
    assert (tmp_path / "run").exists() == (only_in_ranks == "true")
    if only_in_ranks == "true":
        made = record(tmp_path / "run")
        assert made["status"] == "preempted"
        assert made["reason"] == f"stopped by {number.name}, before it could save; resume=auto continues"
    assert left_behind(tmp_path) == []


@pytest.mark.costly
def test_a_signal_after_the_last_step_changes_nothing(tmp_path: Path) -> None:
    """One while the ranks end, and many from when the record is complete to the end of the command."""
    number = signal.SIGUSR1
    started = start(tmp_path, "model.target=leaving:LongEnd")
    wait_until((tmp_path / "fitted").exists)
    started.send_signal(number)
    wait_until(lambda: started.poll() is not None or record(tmp_path / "run")["status"] == "ok")
    while started.poll() is None:
        started.send_signal(number)
        time.sleep(0.005)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 0, told
    assert record(tmp_path / "run")["status"] == "ok"
    assert (tmp_path / "run" / "weights.safetensors").exists()
    assert left_behind(tmp_path) == []
