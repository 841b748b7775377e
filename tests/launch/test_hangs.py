"""What a rank's own watchdog cannot see: the supervisor ends it, says why and where, and leaves nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import left_behind

import runner
from runner.config.compose.resolve import resolve
from runner.launch.start import train
from runner.record import RunRecord

MINE = """
import atexit
import ctypes
import os
import time

import torch
from lightning.pytorch.loggers import CSVLogger


def data():
    x = torch.randn(64, 8)
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def rest():
    while True:
        time.sleep(0.1)


class Stuck(torch.nn.Module):
    \"\"\"From its third forward in training on, it stays in native code that holds the interpreter's lock.\"\"\"

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        self.seen = 0

    def forward(self, x):
        self.seen += self.training
        if self.seen > 20:
            spin()
        return self.linear(x)


def spin():
    while True:
        ctypes.PyDLL(None).sleep(1000)


def stuck():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), Stuck())


def quick(at_exit=False):
    if at_exit and "RANK" in os.environ:
        atexit.register(rest)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


class EndlessLogger(CSVLogger):
    def __init__(self):
        super().__init__("logs_of_mine")

    def finalize(self, status):
        rest()
"""
USUAL = [
    *("model=custom", "data=custom", "data.target=mine_that_hangs:data", "loss=mse", "run_dir=run"),
    *("data.batch_size=8", "trainer.max_steps=200", "trainer.log_every=1000"),
]


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a user's module."""
    (tmp_path / "mine_that_hangs.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _train(*overrides: str) -> tuple[int, RunRecord]:
    status = train(resolve([*USUAL, *overrides]), command="a test")
    return status, RunRecord.load(Path("run"))


@pytest.mark.costly
def test_native_code_that_holds_the_interpreters_lock(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.config.schema.WATCHDOG_MARGIN_SECONDS", 2.0)
    status, record = _train("model.target=mine_that_hangs:stuck", "launcher.step_timeout_seconds=20")
    assert (status, record.status) == (1, "failed")
    assert str(record.reason).startswith("rank 0 (stage 0, layers 0..1) was ended: its steps made no progress for 22 s")
    assert "(launcher.step_timeout_seconds), at mine_that_hangs.py:" in str(record.reason)
    assert str(record.reason).endswith(" in spin")
    assert left_behind(project) == []


@pytest.mark.costly
def test_a_hang_after_the_last_step(project: Path) -> None:
    overrides = ("trainer.max_steps=2", "logger=custom", "logger.target=mine_that_hangs:EndlessLogger")
    status, record = _train("model.target=mine_that_hangs:quick", *overrides, "launcher.exit_timeout_seconds=12")
    assert (status, record.status) == (1, "failed")
    assert "was ended: it did not end within 12 s after its last step (launcher.exit_timeout_seconds)" in str(
        record.reason
    )
    assert "in rest" in str(record.reason)
    assert left_behind(project) == []


@pytest.mark.costly
def test_a_hang_after_complete_work(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An exit function sleeps: nothing is lost, so the run is a success; the log says what was ended."""
    overrides = ("trainer.max_steps=2", "+model.kwargs.at_exit=true", "launcher.exit_timeout_seconds=12")
    with caplog.at_level(logging.WARNING):
        status, record = _train("model.target=mine_that_hangs:quick", *overrides)
    assert (status, record.status, record.steps) == (0, "ok", 2)
    assert "was ended, and nothing is lost: it did not end within 12 s after its work was complete" in caplog.text
    assert "in rest" in caplog.text
    assert left_behind(project) == []


AT_EXIT = """
import atexit, sys, time
import runner.cli.main as command
command._EXIT_SECONDS = 0.2
atexit.register(time.sleep, 600)
sys.argv[1:] = ["--version"]
sys.exit(command.main())
"""


def test_a_sleeping_exit_function_does_not_keep_the_command(project: Path) -> None:
    """The command calls the model's function, too, to plan, so that a module's exit function is also its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}
    command = [sys.executable, "-c", AT_EXIT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    assert "exit functions did not end within 0.2 s" in done.stderr
    assert left_behind(project) == []


AT_END = """
import atexit, sys, threading, time
import runner.cli.main as command
def later():
    time.sleep(0.3)
    print("thread ended")
atexit.register(print, "exit function called")
threading.Thread(target=later).start()
sys.argv[1:] = ["--version"]
command.main()
print("never printed")
"""


def test_threads_and_exit_functions_end_before_the_command(project: Path) -> None:
    """The command leaves out the interpreter's teardown, and nothing else."""
    environment = {**os.environ, "PYTHONPATH": str(Path(runner.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", AT_END], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [runner.__version__, "thread ended", "exit function called"]
    assert not done.stderr
