"""Completes the record of a run whose SLURM job has ended before it could, e.g. in a line of ``launcher.setup``."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from runner.launch.run.lock import InUseError, refuse_if_in_use
from runner.launch.slurm.requeue import ENDED, NoAnswerError, job_state
from runner.launch.slurm.script import LOG_FILE
from runner.record import RECORD_FILE, RunRecord, finish_failed

__all__ = ["JOB", "POLL_SECONDS", "SETTLED", "complete_ended", "complete_record"]

JOB = "slurm_job"
"""The record's key, among its extras, for the number of the run's job."""
POLL_SECONDS = 0.5
SETTLED = 3
"""Polls in a row: a job that is queued again also passes through states that mean "ended"."""
_FORGOTTEN = "unknown to SLURM"
_LOG_BYTES = 4096


def complete_ended(directory: Path) -> None:
    """Ask SLURM about the runs that are said to be running in the directory of a run or of a sweep.

    Nothing is changed where there is no SLURM, where its controller does not answer, or where a command works.
    """
    if shutil.which("scontrol") is None:
        return
    for record_file in (directory / RECORD_FILE, *directory.glob(f"[0-9]*/{RECORD_FILE}")):
        state, job = None, _running_job(record_file.parent)
        if job is not None:
            with contextlib.suppress(NoAnswerError):
                state = _end_of(job)
        if job is not None and state is not None and not _is_in_use(record_file.parent):
            complete_record(record_file.parent, job, state)


def complete_record(run_dir: Path, job: str, state: str) -> RunRecord:
    """Return the record of a run whose job has ended in this state; if it could not complete it itself, it is done."""
    record = RunRecord.load(run_dir)
    if record.status != "running":
        return record
    how = f"ended as {state}" if state in ENDED else "has ended, and SLURM does not know how"
    last = _last_words(run_dir / LOG_FILE)
    return finish_failed(run_dir, "failed", f"SLURM job {job} {how}{f': {last}' if last else ''}")


def _running_job(run_dir: Path) -> str | None:
    """The number of the job of a run whose record says that it runs."""
    try:
        record = RunRecord.load(run_dir)
    except (FileNotFoundError, ValueError):
        return None
    job = record.extras.get(JOB)
    return job if record.status == "running" and isinstance(job, str) else None


def _end_of(job: str) -> str | None:
    """The state in which the job has ended; None if it has not."""
    state = None
    for poll in range(SETTLED):
        time.sleep(POLL_SECONDS if poll else 0.0)
        state = job_state(job, 0.0) or _FORGOTTEN
        if state not in (*ENDED, _FORGOTTEN):
            return None
    return state


def _is_in_use(run_dir: Path) -> bool:
    """Whether a command works in the directory, e.g. one that goes on with the run on this machine."""
    try:
        refuse_if_in_use(run_dir)
    except InUseError:
        return True
    return False


def _last_words(log: Path) -> str:
    """The last line of the job's log that is not srun's own, which only repeats that a task has failed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith("srun: ")), "")
