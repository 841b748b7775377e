"""Told to stop, a run has the time that its scheduler leaves it; only a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_helpers import environment, wait_for

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.launch.local.grace import grace_seconds

# A command of one rank whose step takes SECONDS; told to stop, it ends the step and saves.
SLOW = """
import functools, sys
from pathlib import Path
from runner.launch.processes.supervise import ProcessSpec, supervise
rank = '''
import pathlib, signal, sys, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
pathlib.Path("begun").write_text("yes")
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end or not told:
    time.sleep(0.02)
pathlib.Path("saved").write_text("yes")
'''
ending = supervise([ProcessSpec([sys.executable, "-S", "-c", rank, sys.argv[1]], {})], grace_seconds=lambda: 60.0)
print(ending.interrupted_by, ending.returncodes)
"""


def _told(
    directory: Path, *numbers: int, seconds: float, nohup: bool = False, until_it_ends: bool = False
) -> tuple[str, bool]:
    """What the command prints, and whether its rank has saved; of signals that meet, a process gets one."""
    line = [sys.executable, "-c", SLOW, str(seconds)]
    process = subprocess.Popen(
        ["nohup", *line] if nohup else line,
        cwd=directory,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    wait_for([directory / "begun"])
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.2)
    while until_it_ends and process.poll() is None:
        process.send_signal(numbers[-1])
        time.sleep(0.2)
    said, _ = process.communicate(timeout=1500)
    return said.strip(), (directory / "saved").exists()


@pytest.mark.costly
@pytest.mark.parametrize(
    "numbers",
    [
        (signal.SIGUSR1, signal.SIGTERM),
        (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP),
        (signal.SIGUSR1, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
def test_signals_after_the_first_do_not_disturb_the_save(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """As SLURM sends them: SIGUSR1 some time ahead, then SIGTERM."""
    assert _told(tmp_path, *numbers, seconds=2.0) == (f"{int(numbers[0])} (0,)", True)


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    said, saved = _told(tmp_path, signal.SIGTERM, signal.SIGINT, signal.SIGINT, seconds=600.0, until_it_ends=True)
    assert said == f"{int(signal.SIGTERM)} (-9,)"
    assert not saved


def test_a_command_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    said, saved = _told(tmp_path, signal.SIGHUP, signal.SIGUSR1, seconds=1.0, nohup=True)
    assert said == f"{int(signal.SIGUSR1)} (0,)"  # SIGHUP was ignored and stayed so
    assert saved


def test_the_time_to_stop_is_what_the_scheduler_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    launcher = resolve(["model=mlp"]).launcher
    assert grace_seconds(launcher) == 120
    assert grace_seconds(resolve(["model=mlp", "launcher.grace_seconds=7"]).launcher) == 7
    assert grace_seconds(resolve(["model=mlp", "launcher.step_timeout_seconds=30"]).launcher) == 30
    end = int(time.time()) + 300
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    before = time.time()
    found = grace_seconds(launcher)
    assert end - time.time() - 15 < found <= end - before - 5  # a few seconds before the job's end
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10_000))
    assert grace_seconds(launcher) == launcher.step_timeout_seconds
    monkeypatch.setenv("SLURM_JOB_END_TIME", "unlimited")
    assert grace_seconds(launcher) == 120


def test_slurm_has_a_time_of_its_own() -> None:
    (problem,) = rules(resolve(["model=mlp", "launcher=slurm", "launcher.grace_seconds=9"]))
    assert problem.line().startswith("launcher.grace_seconds = 9.0: belongs to launcher=local.")
