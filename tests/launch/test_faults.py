"""Faults while a run is under way: the status, the cause in the record, what was done is kept, no process is left."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from covering import sampled
from processes import left_behind
from user_project import OVERRIDES, environment, make_directory, record, train
from warm import Warm

pytestmark = pytest.mark.slow
TWO = ("parallelism.pipeline=2", "schedule.microbatches=2", "partition=uniform")
PHASES = ("import", "rehearsal", "step", "validation", "save")


def start(directory: Path, *overrides: str) -> Warm:
    command = [sys.executable, "-m", "runner", "train", *OVERRIDES, "logger=none", *overrides]
    return Warm(command, cwd=directory, env=environment(directory), stderr=subprocess.PIPE, text=True)


def wait_until(ready: Callable[[], bool], seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("wrong", "workers", "told"),
    [
        ("raises", 2, "ValueError: sample 33 is broken (in loader worker"),
        pytest.param("exits", 1, "exited unexpectedly", marks=pytest.mark.full),
        pytest.param("text", 0, "a sample of the dataset must be (input, target), not a str", marks=pytest.mark.full),
        pytest.param(
            "short",
            0,
            "the samples of a batch must have the same shapes: one is (6,) float32, () int64, another (5,)",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_dataset_that_goes_wrong_later(tmp_path: Path, wrong: str, workers: int, told: str) -> None:
    data = ("data.target=mine:Items", "data.kwargs.wrong_at=33", f"data.kwargs.wrong={wrong}")
    done = train(make_directory(tmp_path), *TWO, *data, f"data.workers={workers}", "trainer.max_steps=8")
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", len(made["loss"]))
    assert told in made["reason"]
    assert left_behind(tmp_path) == []


@pytest.mark.full
def test_a_logger_that_raises(tmp_path: Path) -> None:
    done = train(make_directory(tmp_path), "logger=custom", "logger.target=mine:raising")
    assert done.returncode == 1
    assert "ValueError: the vocabulary is not there (mine.py:" in record(tmp_path / "run")["reason"]


@pytest.mark.full
def test_a_callback_that_raises(tmp_path: Path) -> None:
    """Of a LightningModule, on one rank of two; the other one is ended."""
    directory = make_directory(tmp_path)
    (directory / "hooked.py").write_text(_HOOKED, encoding="utf-8")
    words = [word for word in OVERRIDES if not word.startswith(("model.", "loss."))]
    command = [sys.executable, "-m", "runner", "train", *words, "model.target=hooked:Hooked", "parallelism.data=2"]
    done = warm.run([*command, "logger=none"], cwd=directory, env=environment(directory))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    made = record(directory / "run")
    assert (made["status"], made["steps"]) == ("failed", len(made["loss"]))
    assert "rank 1 (stage 0, layers 0..0) failed: ValueError: the callback is broken (hooked.py:" in made["reason"]
    assert left_behind(directory) == []


_HOOKED = """
import os

import lightning.pytorch as pl
import torch
from mine import model


class Breaks(pl.Callback):
    def on_train_batch_end(self, trainer, *args):
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise ValueError("the callback is broken")


class Hooked(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model()

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def configure_callbacks(self):
        return [Breaks()]
"""


def test_a_report_that_raises_and_a_port_that_is_taken_spoil_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        done = train(make_directory(tmp_path), *TWO, "report=mine:report_raising")
    assert done.returncode == 0, done.stderr
    assert "report = mine:report_raising failed" in done.stderr
    assert record(tmp_path / "run")["status"] == "ok"


@pytest.mark.parametrize("phase", sampled(PHASES, "step", "save"))
def test_a_rank_killed_in_any_phase_ends_the_run(tmp_path: Path, phase: str) -> None:
    directory = make_directory(tmp_path)
    started = start(directory, *TWO, "model.target=mine:waiting", f"model.kwargs.phase={phase}", "trainer.max_steps=40")
    waiting = directory / "waiting"
    wait_until(lambda: waiting.exists() and bool(waiting.read_text()))
    os.kill(int(waiting.read_text()), signal.SIGKILL)
    killed_at = time.monotonic()
    _, told = started.communicate(timeout=60)
    assert time.monotonic() - killed_at < 20
    assert started.returncode == 1
    assert "rank 1 (stage 1, layers 2..3) died: SIGKILL" in told
    assert "Traceback" not in told
    made = record(directory / "run")
    assert made["status"] == "failed"
    assert "died: SIGKILL" in made["reason"]
    assert made["steps"] == len(made["loss"])
    assert (made["steps"] > 0) == (phase not in ("import", "rehearsal"))
    assert left_behind(directory) == []


@pytest.mark.parametrize("phase", sampled(PHASES, "rehearsal", "validation"))
def test_ctrl_c_in_any_phase_ends_the_run(tmp_path: Path, phase: str) -> None:
    directory = make_directory(tmp_path)
    started = start(directory, *TWO, "model.target=mine:waiting", f"model.kwargs.phase={phase}", "trainer.max_steps=40")
    wait_until((directory / "waiting").exists)
    for _ in range(2):  # a second one does not wait for ranks that hang
        started.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Traceback" not in told
    made = record(directory / "run")
    assert (made["status"], made["steps"]) == ("interrupted", len(made["loss"]))
    assert left_behind(directory) == []


def test_a_signal_brings_no_validation_of_its_own(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    started = start(directory, *TWO, "trainer.max_steps=1000000")
    steps = directory / "run" / "steps.jsonl"
    wait_until(lambda: steps.exists() and steps.stat().st_size > 0)
    started.send_signal(signal.SIGTERM)
    _, told = started.communicate(timeout=60)
    assert started.returncode == 75, told
    made = record(directory / "run")
    assert (made["status"], made["val_loss"]) == ("preempted", [])
    assert f"stopped by SIGTERM, saved after step {made['steps']}; resume=auto continues" in told
    assert list((directory / "run" / "checkpoints").iterdir()), "the last step is saved"
    assert left_behind(directory) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.parametrize("full_at", sampled(["start", "checkpoint", "part"], "start", "part"))
def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path, full_at: str) -> None:
    run = small_disk / "run"
    if full_at == "start":
        (small_disk / "ballast").write_bytes(bytes(160_000 - 8192))
    in_parts = f"checkpoint.asynchronous={str(full_at == 'part').lower()}"
    done = train(make_directory(tmp_path), "model.kwargs.width=128", f"run_dir={run}", in_parts)
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    if full_at != "start":
        made = record(run)
        assert (made["status"], made["steps"]) == ("failed", 4)
        assert "No space left on device" in made["reason"]
    assert left_behind(tmp_path) == []


@pytest.mark.full
def test_files_that_may_not_grow(tmp_path: Path) -> None:
    """The other way to be out of space: a limit of the user's own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, before[1]))
    try:
        done = subprocess.run(  # executed: the limit is inherited
            [sys.executable, "-m", "runner", "train", *OVERRIDES, "logger=none", "model.kwargs.width=128"],
            cwd=make_directory(tmp_path), env=environment(tmp_path), capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", 4)
    assert "File too large" in made["reason"]
