"""A run that fails says where, keeps what it has, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import working_in
from user_project import OVERRIDES, environment, make_directory, plain_result, record, train
from warm import Warm

PIPELINE = ("parallelism.pipeline=2", "schedule.microbatches=4", "partition=uniform")
LATE = "trainer.max_steps=8"  # the layer breaks in its 31st forward, which is the third of step 8
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("loss.target=mine:per_sample",), "loss.target = shape (2,): must return a scalar mean over its samples"),
        (("model.target=mine:no_such",), "model.target = mine:no_such: must name a function of that module"),
        (("model.target=theirs:model",), "Importing theirs raised ModuleNotFoundError"),
        (("parallelism.pipeline=8",), "parallelism.pipeline = 8: the schedule makes 8 stages, the model has 7 layers"),
        (("model.target=mine:breaking", "model.kwargs.what=none", "model.kwargs.calls=0"),
         "layer 1 (Breaks): must return tensors, not a NoneType"),
        (("model.target=mine:breaking", "model.kwargs.what=short", "model.kwargs.calls=0"),
         "layer 3 (Linear) must take what comes before it. Given (2, 7) float32, it raised RuntimeError"),
    ],
)  # fmt: skip
def test_wrong_requests(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    done = train(make_directory(tmp_path), *PIPELINE, *overrides)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_layer_that_fails_is_shown_in_the_schedule(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path), *PIPELINE, "model.target=mine:breaking", "model.kwargs.what=raises", LATE)
    assert done.returncode == 1
    assert "0F2 failed on rank 0 (stage 0, layers 0..1): ValueError: the layer is broken (mine.py:" in done.stderr
    assert "its buffers: input: (2, 6) float32" in done.stderr
    assert "^ here: 0F2 (rank 0, cell 3)" in done.stderr
    made = record(tmp_path / "run")
    assert made["status"] == "failed"
    assert "the layer is broken" in made["reason"]
    assert made["steps"] == len(made["loss"]) == 7


def test_a_loss_that_is_not_finite_ends_the_run_and_the_losses_before_it_stay(tmp_path: Path) -> None:
    broken = ("model.target=mine:breaking", "model.kwargs.what=infinite", LATE)
    done = train(make_directory(tmp_path), *PIPELINE, *broken)
    assert done.returncode == 1
    where = "first not finite: the output of layer 1 on stage 0, micro-batch 0"
    assert f"step 8: the loss is nan; {where}; the weights are those of the step before" in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", 7)
    assert len(made["loss"]) == 7


@pytest.mark.full
def test_a_dataset_that_raises(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path), *PIPELINE, "data.target=mine:Raising", "trainer.max_steps=8")
    assert done.returncode == 1
    assert "ValueError: sample 33 is broken (mine.py:" in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", 4)


@pytest.mark.full
def test_a_killed_rank_ends_the_run_within_seconds(tmp_path: Path) -> None:
    """In the middle of training: the others wait for its messages."""
    directory = make_directory(tmp_path)
    command = [sys.executable, "-m", "runner", "train", *OVERRIDES, *PIPELINE, "trainer.max_steps=1000000"]
    started = Warm(command, cwd=directory, env=environment(directory), stderr=subprocess.PIPE, text=True)
    steps = directory / "run" / "steps.jsonl"
    _wait_until(lambda: steps.exists() and steps.stat().st_size > 0)
    ranks = _ranks(directory)
    os.kill(ranks[1], signal.SIGKILL)
    killed_at = time.monotonic()
    _, err = started.communicate(timeout=60)
    assert time.monotonic() - killed_at < 10
    assert started.returncode == 1
    assert "rank 1 (stage 1, layers 4..6) died: SIGKILL" in err
    made = record(directory / "run")
    assert made["status"] == "failed"
    assert made["steps"] == len(made["loss"]) > 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks.values())


@pytest.mark.full
def test_torchrun_gives_the_same(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        "-m", "runner", "train", *OVERRIDES, *PIPELINE,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=directory, env=environment(directory), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    made = record(directory / "run")
    assert made["status"] == "ok"
    assert made["loss"] == plain_result(count=4)[0]


def _ranks(directory: Path) -> dict[int, int]:
    """Rank to process id, by the names of the processes that work in this directory."""
    names = {pid: Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").split() for pid in working_in(directory)}
    return {int(name[1]): pid for pid, name in names.items() if name[0] == "rank"}


def _wait_until(ready: Any, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
