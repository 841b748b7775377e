"""A job that ends before a rank has started, e.g. in a line of ``launcher.setup``, does not stay "running" for ever."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.cli.main import main
from runner.launch.run.lock import alone_in
from runner.launch.slurm import ended
from runner.record import RunRecord

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
NONE = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
LOG = "launcher.setup failed: cd /nowhere\n"


@pytest.fixture
def says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a line of shell the answer of scontrol."""
    monkeypatch.setattr(ended, "POLL_SECONDS", 0.0)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def say(line: str) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / "scontrol").chmod(0o755)

    return say


def _run(directory: Path, log: str = LOG) -> Path:
    (directory / "logs").mkdir(parents=True)
    (directory / "logs" / "slurm.log").write_text(log)
    RunRecord(status="running", extras={"slurm_job": "7"}).save(directory)
    return directory


def test_a_report_asks_slurm_how_the_job_has_ended(tmp_path: Path, says: Callable[[str], None]) -> None:
    run_dir = _run(tmp_path / "run")
    says("echo JobId=7 JobState=FAILED Reason=NonZeroExitCode")
    assert main(["report", str(run_dir)]) == 0
    found = RunRecord.load(run_dir)
    assert (found.status, found.reason) == (
        "failed",
        "SLURM job 7 ended as FAILED: launcher.setup failed: cd /nowhere",
    )


def test_the_jobs_of_a_sweep_and_jobs_that_slurm_has_forgotten(tmp_path: Path, says: Callable[[str], None]) -> None:
    job = _run(tmp_path / "0", "slurmstepd: error: execve(): apptainer: No such file\nsrun: error: task 0\n")
    says(NONE)
    ended.complete_ended(tmp_path)
    told = "SLURM job 7 has ended, and SLURM does not know how: slurmstepd: error: execve(): apptainer: No such file"
    assert RunRecord.load(job).reason == told


@pytest.mark.parametrize("line", ["echo JobId=7 JobState=RUNNING", "echo JobId=7 JobState=PENDING", AWAY])
def test_a_job_that_may_run_is_left_alone(line: str, tmp_path: Path, says: Callable[[str], None]) -> None:
    run_dir = _run(tmp_path / "run")
    says(line)
    ended.complete_ended(run_dir)
    assert RunRecord.load(run_dir).status == "running"


def test_a_run_that_goes_on_on_this_machine_is_left_alone(tmp_path: Path, says: Callable[[str], None]) -> None:
    run_dir = _run(tmp_path / "run")
    says("echo JobId=7 JobState=TIMEOUT")
    with alone_in(run_dir, "runner train resume=auto"):
        ended.complete_ended(run_dir)
    assert RunRecord.load(run_dir).status == "running"


def test_without_slurm_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = _run(tmp_path / "run")
    monkeypatch.setenv("PATH", str(tmp_path))
    ended.complete_ended(run_dir)
    assert RunRecord.load(run_dir).status == "running"
