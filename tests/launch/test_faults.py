"""Faults while a run is under way: the status, the cause in the record, what was done is kept, no process is left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import user_code
from processes import left_behind
from user_project import OVERRIDES, environment, make_directory, record, train
from warm import Warm

from runner.errors import RunFailedError
from runner.training.data.loading import make_loader

TWO = ("parallelism.pipeline=2", "schedule.microbatches=2", "partition=uniform")
PARTS = ("parallelism.tensor=2", "parallelism.sharding={0: column_gathered, 3: row_whole_input}")


def start(directory: Path, *overrides: str) -> Warm:
    command = [sys.executable, "-m", "runner", "train", *OVERRIDES, "logger=none", *overrides]
    return Warm(command, cwd=directory, env=environment(directory), stderr=subprocess.PIPE, text=True)


def wait_until(ready: Callable[[], bool], seconds: float = 1500.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


@pytest.mark.costly
def test_a_dataset_that_goes_wrong_later(tmp_path: Path) -> None:
    told = "ValueError: sample 33 is broken (in loader worker"
    data = ("data.target=mine:Items", "data.kwargs.wrong_at=33", "data.kwargs.wrong=raises")
    done = train(make_directory(tmp_path), *TWO, *data, "data.workers=2", "trainer.max_steps=8")
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    made = record(tmp_path / "run")
    assert (made["status"], made["steps"]) == ("failed", len(made["loss"]))
    assert told in made["reason"]
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("text", "a sample of the dataset must be (input, target), not a str"),
        ("short", "the samples of a batch must have the same shapes: one is (6,) float32, () int64, another (5,)"),
    ],
)
def test_a_sample_that_is_not_as_the_others(wrong: str, told: str) -> None:
    loader = make_loader(
        user_code.Items(wrong_at=3, wrong=wrong), 40, batch_size=8, data=1, replica=0, inputs=True, targets=True,
        shuffle=False, seed=0,
    )  # fmt: skip
    with pytest.raises(RunFailedError, match=re.escape(told)):
        next(iter(loader))


@pytest.mark.costly
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


@pytest.mark.costly
@pytest.mark.parametrize(
    ("layout", "place"),
    [
        (TWO, "rank 1 (stage 1, layers 2..3)"),
        (PARTS, "rank 1 (stage 0, layers 0..3, part 1 of those of ranks 0, 1)"),
    ],
)
def test_a_rank_that_is_killed_while_it_saves_ends_the_run(layout: tuple[str, ...], place: str, tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    started = start(directory, *layout, "model.target=mine:waiting", "model.kwargs.phase=save", "trainer.max_steps=40")
    waiting = directory / "waiting"
    wait_until(lambda: waiting.exists() and bool(waiting.read_text()))
    os.kill(int(waiting.read_text()), signal.SIGKILL)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 1
    assert f"{place} died: SIGKILL" in told
    assert "Traceback" not in told
    made = record(directory / "run")
    assert made["status"] == "failed"
    assert "died: SIGKILL" in made["reason"]
    assert made["steps"] == len(made["loss"]) > 0
    assert left_behind(directory) == []


@pytest.mark.costly
@pytest.mark.parametrize("phase", ["rehearsal", "validation"])
def test_ctrl_c_ends_the_run(tmp_path: Path, phase: str) -> None:
    directory = make_directory(tmp_path)
    started = start(directory, *TWO, "model.target=mine:waiting", f"model.kwargs.phase={phase}", "trainer.max_steps=40")
    wait_until((directory / "waiting").exists)
    for _ in range(2):  # a second one does not wait for ranks that hang
        started.send_signal(signal.SIGINT)
        time.sleep(0.3)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 130
    assert "Traceback" not in told
    made = record(directory / "run")
    assert (made["status"], made["steps"]) == ("interrupted", len(made["loss"]))
    assert left_behind(directory) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 208 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=208k", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=False)


@pytest.mark.costly
@pytest.mark.parametrize("full_at", ["start", "part"])
def test_a_disk_that_is_full(tmp_path: Path, small_disk: Path, full_at: str) -> None:
    run = small_disk / "run"
    if full_at == "start":
        (small_disk / "ballast").write_bytes(bytes(208_000 - 8192))
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
