"""What ended a run is told in one line; ranks that ended because of it are not told as causes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import runner
from runner.errors import RunFailedError
from runner.launch.failure import RankFailure, error_file
from runner.launch.local import ranks
from runner.launch.processes.supervise import Ending

GLOO = (
    "[/build/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:28887. This is typically caused by"
)
LOST = (f"{GLOO} a remote worker", "rank 0 closed its connection: it has ended", "Connection reset by peer")
FULL = (
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "/x/data.py", line 3, in f\nRuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_3>: '
    "No space left on device (28)",
    "DataLoader worker (pid 12) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory.",
    "unable to write to file </torch_12_34_0>: No space left on device (28)",
)


def told(directory: Path, *messages: tuple[BaseException | None, float]) -> tuple[str, ...]:
    """What is said of ranks that failed with these errors at these times; None: without a report."""
    (directory / "logs").mkdir(exist_ok=True)
    for rank, (error, when) in enumerate(messages):
        error_file(directory, rank).unlink(missing_ok=True)
        if error is not None:
            replace(RankFailure.of(error), time=when).save(error_file(directory, rank))
    codes = tuple(1 if error is not None else -9 for error, _ in messages)
    ending = Ending(codes, tuple(range(len(messages))), None)
    launch = ranks.Launch(directory / "config.yaml", directory, len(messages), 1, lambda rank: f"stage {rank}")
    left = ranks._Left({}, dict.fromkeys(range(len(messages)), ""))
    return ranks._outcome(launch, ending, left, killed_for_memory=False).lines


@pytest.mark.parametrize("lost", LOST)
def test_who_lost_a_connection_is_no_cause_whenever_it_ended(lost: str, tmp_path: Path) -> None:
    (line,) = told(tmp_path, (RuntimeError(lost), 1.0), (ValueError("the cause"), 2.0), (RuntimeError(lost), 3.0))
    assert line.startswith("rank 1 (stage 1) failed: ValueError: the cause")
    (line,) = told(tmp_path, (RuntimeError(lost), 1.0), (None, 0.0))
    assert line == "rank 1 (stage 1) died: SIGKILL"


def test_without_another_cause_the_first_that_lost_one_is_told(tmp_path: Path) -> None:
    (line,) = told(tmp_path, (RuntimeError(LOST[0]), 2.0), (RuntimeError(LOST[1]), 1.0))
    assert line.startswith("rank 1 (stage 1) failed: ")


def test_two_causes_are_both_told_and_the_first_one_last(tmp_path: Path) -> None:
    lines = told(tmp_path, (ValueError("later"), 2.0), (ValueError("first"), 1.0), (RuntimeError(LOST[1]), 1.5))
    assert [line.split("ValueError: ")[1][:5] for line in lines] == ["later", "first"]


@pytest.mark.parametrize("message", FULL)
def test_workers_without_shared_memory_are_told_as_that(message: str) -> None:
    failure = RankFailure.of(RuntimeError(message))
    assert failure.explained
    assert failure.exit_status == RunFailedError.exit_status
    assert failure.summary().startswith("/dev/shm")
    assert failure.summary().endswith("start the container with --shm-size=1g, or take data.workers=0")


CODE = """
import torch
from torch import nn
from torch.utils.data import Dataset


class Wide(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        return torch.full((30_000,), float(at)), torch.zeros(2)


def build():
    return nn.Sequential(nn.Linear(30_000, 4), nn.Tanh(), nn.Linear(4, 2))
"""


@pytest.mark.costly
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("unshare") is None, reason="needs mounts of its own")
def test_a_small_shared_memory_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False, capture_output=True).returncode:
        pytest.skip("no mounts are allowed here")
    words = ("model.target=mine:build", "data.target=mine:Wide", "loss=mse", "data.batch_size=16", "data.workers=1",
             "trainer.max_steps=4", "parallelism.pipeline=2", "schedule.microbatches=2", "logger=none", "run_dir=run",
             "device=cpu")  # fmt: skip
    line = f"{mount} && exec {sys.executable} -m runner train {' '.join(words)}"
    environment = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", line], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=1500
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "failed" in line]
    assert len(said) == 1
    assert "/dev/shm (1.05 MB) is too small for the batches that the workers of data.workers hand over" in said[0]
