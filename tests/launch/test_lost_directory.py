"""A run's directory that is lost while the run is under way: the command ends at once and says the cause in a line."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import left_behind
from user_project import OVERRIDES, environment, make_directory, record
from warm import Warm

_SLOW = """
import time

from mine import model
from torch import nn


class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x


def slow():
    return nn.Sequential(*model(), Slow())
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 300 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=False)


def run_in_steps(directory: Path, run: Path, *overrides: str) -> Warm:
    """A run of 20 ms a layer's pass that has taken some steps."""
    make_directory(directory)
    (directory / "slow.py").write_text(_SLOW, encoding="utf-8")
    words = [word for word in OVERRIDES if not word.startswith(("model.", "run_dir=", "trainer.max_steps="))]
    words += ["model.target=slow:slow", f"run_dir={run}", "trainer.max_steps=400", *overrides]
    line = [sys.executable, "-m", "runner", "train", *words]
    started = Warm(line, cwd=directory, env=environment(directory), stderr=subprocess.PIPE, text=True)
    steps, end = run / "steps.jsonl", time.monotonic() + 1500
    while not steps.exists() or steps.read_text().count("\n") < 4:
        assert time.monotonic() < end, "it took no steps"
        time.sleep(0.02)
    return started


def fill(place: Path) -> None:
    with (place / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1024)):
            pass


@pytest.mark.costly
def test_a_directory_that_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = run_in_steps(tmp_path, run, "logger=csv", "parallelism.pipeline=2")
    run.rename(tmp_path / "away")  # in one move: another process would make files in what is being removed
    shutil.rmtree(tmp_path / "away")
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 1
    assert f"failed: the run directory {run} was removed during the run" in told
    assert "Traceback" not in told
    assert not run.exists(), "nobody makes it anew"
    assert left_behind(tmp_path) == []


@pytest.mark.costly
def test_a_disk_that_others_fill(tmp_path: Path, disk: Path) -> None:
    """Not even the reason has room in the directory: it is told all the same."""
    run = disk / "run"
    started = run_in_steps(tmp_path, run, "logger=none")
    fill(disk)
    _, told = started.communicate(timeout=1500)
    assert started.returncode == 1
    assert f"failed: the run directory {run} cannot be written: No space left on device" in told
    assert "Traceback" not in told
    assert record(run)["status"] == "running", "there was no room to change it"
    assert left_behind(tmp_path) == []
