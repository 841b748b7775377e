"""Puts a job back into SLURM's queue, the last action of a run that was told to stop."""

from __future__ import annotations

import logging
import subprocess

__all__ = ["ENDED", "job_state", "requeue"]

logger = logging.getLogger(__name__)

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")
"""The states of a job that has ended. A job that is being queued again can show one of them for a moment."""

_SECONDS = 60
# In any other state the user has cancelled the job, or SLURM queues it again by itself.
_OURS = ("RUNNING", "TIMEOUT")


def requeue(job: str) -> bool:
    """Put the job back into the queue under its number, and return whether that was done.

    SLURM then ends the processes of the job.
    """
    state = job_state(job)
    if state not in _OURS:
        logger.info("job %s is %s: it is not queued again from here", job, state or "unknown to SLURM")
        return False
    done = subprocess.run(
        ["scontrol", "requeue", job],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        logger.error("job %s could not be queued again: %s", job, done.stderr.strip())
        return False
    logger.info("job %s is queued again", job)
    return True


def job_state(job: str) -> str | None:
    """The state of a job (``RUNNING``, ``PENDING``, …), or None if SLURM does not know the job."""
    try:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = [word.split("=", 1) for word in done.stdout.split() if "=" in word]
    return next((value for key, value in words if key == "JobState"), None)
