"""A controller of SLURM that does not answer says nothing about the jobs, which go on meanwhile."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.launch import attach
from runner.launch.failure import RankFailure
from runner.launch.hydra.array import follow_jobs
from runner.launch.slurm import requeue as slurm
from runner.launch.slurm.step import Step
from runner.launch.slurm.submit import unfinished_job
from runner.record import RunRecord, finish_failed

AWAY = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
SLOW = "slurm_load_jobs error: Socket timed out on send/recv operation"
NONE = "slurm_load_jobs error: Invalid job id specified"
# scontrol that gives one answer after the other; the last again and again.
SCONTROL = """#!/bin/sh
cd "$(dirname "$0")"
echo "$*" >> asked
line=$(head -n 1 answers)
[ "$(wc -l < answers)" -gt 1 ] && tail -n +2 answers > rest && mv rest answers
case "$line" in
    *error*) echo "$line" >&2; exit 1 ;;
    done) exit 0 ;;
    *) echo "JobId=7 JobState=$line Reason=None" ;;
esac
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose ``answers`` are what scontrol says, and whose ``asked`` is what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("runner.launch.hydra.array._POLL_SECONDS", 0.01)
    return folder


def _answers(folder: Path, *lines: str) -> None:
    (folder / "answers").write_text("".join(f"{line}\n" for line in lines))


def _asked(folder: Path) -> list[str]:
    return (folder / "asked").read_text().splitlines()


def test_live_jobs_of_a_sweep_do_not_fail_because_the_controller_is_away(
    scontrol: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").mkdir()
    RunRecord(status="running").save(tmp_path / "0")
    _answers(scontrol, "RUNNING", *[AWAY] * 6, "RUNNING", *[SLOW] * 4, "NODE_FAIL")
    follow_jobs({0: "7"}, tmp_path)
    assert RunRecord.load(tmp_path / "0").reason == "SLURM job 7 ended as NODE_FAIL"
    assert "does not tell the state of job 7" in caplog.text


def test_a_job_that_slurm_has_forgotten_has_ended(scontrol: Path, tmp_path: Path) -> None:
    RunRecord(extras={"slurm_job": "7"}).save(tmp_path)
    _answers(scontrol, AWAY, NONE)
    assert unfinished_job(tmp_path) is None
    _answers(scontrol, AWAY, "RUNNING")  # a sweep that is started again must not submit it a second time
    assert unfinished_job(tmp_path) == "7"


def test_a_requeue_waits_for_the_controller(scontrol: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _answers(scontrol, AWAY, AWAY, "RUNNING", SLOW, AWAY, "RUNNING", "done")
    assert slurm.requeue("7")
    assert [words.split()[0] for words in _asked(scontrol)].count("requeue") == 2
    _answers(scontrol, "RUNNING", SLOW, "PENDING")  # it was done although the answer was lost
    assert not slurm.requeue("7")
    assert "job 7 is PENDING: it is not queued again from here" in caplog.text
    _answers(scontrol, "RUNNING", "slurm error: Requested operation is presently disabled")
    assert not slurm.requeue("7")
    assert "job 7 could not be queued again: slurm error: Requested operation" in caplog.text


def test_a_controller_that_stays_away_does_not_hold_the_ranks_for_ever(
    scontrol: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(slurm, "_PATIENCE_SECONDS", 0.2)
    _answers(scontrol, AWAY)
    assert not slurm.requeue("7")
    assert "SLURM does not answer" in caplog.text


@pytest.mark.parametrize("told_by", ["its watchdog", "another rank"])
def test_without_restarts_a_failed_job_is_not_queued_again(
    told_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of one rank, by its watchdog say, stands in the record when the others find their peer gone."""
    queued: list[str] = []
    monkeypatch.setattr("runner.launch.slurm.step.requeue", queued.append)
    step = Step("7", "0", 0, rank=1, local_rank=1, node=0, nodes="n1", tasks=(2,))
    lost = RankFailure.of(RuntimeError("Connection closed by peer"))
    RunRecord(status="running").save(tmp_path)
    finish_failed(tmp_path, "failed", f"rank 0 was ended by {told_by}")
    for restarts, times in ((0, 0), (1, 1)):
        config = resolve(["model=mlp", f"launcher.max_restarts={restarts}"])
        assert attach._account(lost, config, tmp_path, 1, step) == 1
        assert len(queued) == times
    RunRecord(status="failed", extras={"failures": 1}).save(tmp_path)  # as the start after that counts it
    attach._account(lost, config, tmp_path, 1, step)
    assert len(queued) == 1
