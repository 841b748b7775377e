"""Asks SLURM about jobs, and puts a job back into its queue, the last action of a run that was told to stop.

A controller that does not answer says nothing about a job: it is asked again, because jobs go on running while it is
away.
"""

from __future__ import annotations

import logging
import math
import subprocess
import time

__all__ = ["ENDED", "NoAnswerError", "job_state", "requeue"]

logger = logging.getLogger(__name__)

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE")
"""The states of a job that has ended. A job that is being queued again can show one of them for a moment."""

_SECONDS = 60
_RETRY_SECONDS = 5.0
_PATIENCE_SECONDS = 1800.0  # for a requeue: the ranks hold their machines meanwhile
# What scontrol says where the controller is away or overloaded (SLURM's src/common/slurm_errno.c), in small letters.
_AWAY = ("unable to contact", "timed out", "zero bytes", "connection", "communication", "authentication", "backup mode")
_NO_SUCH_JOB = "invalid job id"
# In any other state the user has cancelled the job, or SLURM queues it again by itself.
_OURS = ("RUNNING", "TIMEOUT")


class NoAnswerError(Exception):
    """SLURM's controller did not answer; the message is what scontrol said."""


class _RefusedError(Exception):
    """SLURM's controller refused what it was asked for; the message is what scontrol said."""


def requeue(job: str) -> bool:
    """Put the job back into the queue under its number, and return whether that was done.

    SLURM then ends the processes of the job. While its controller does not answer, it is asked again, for half an hour.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            state = job_state(job, end - time.monotonic())  # again after an error: it may have been done all the same
            if state not in _OURS:
                logger.info("job %s is %s: it is not queued again from here", job, state or "unknown to SLURM")
                return False
            _scontrol("requeue", job)
        except NoAnswerError as error:
            if time.monotonic() < end:
                time.sleep(_RETRY_SECONDS)
                continue
            logger.error("job %s could not be queued again: SLURM does not answer: %s", job, error)
            return False
        except _RefusedError as error:
            logger.error("job %s could not be queued again: %s", job, error)
            return False
        logger.info("job %s is queued again", job)
        return True


def job_state(job: str, patience_seconds: float = math.inf) -> str | None:
    """The state of a job (``RUNNING``, ``PENDING``, …), or None if SLURM does not know the job.

    A controller that does not answer is asked again for ``patience_seconds``.

    Raises:
        NoAnswerError: it did not answer for so long.
    """
    end, is_told = time.monotonic() + patience_seconds, False
    while True:
        try:
            said = _scontrol("--oneliner", "show", "job", job)
        except _RefusedError as error:
            if _NO_SUCH_JOB in str(error).lower():
                return None
            reason: Exception = error  # not about the job: nothing is known of it
        except NoAnswerError as error:
            reason = error
        else:
            words = [word.split("=", 1) for word in said.split() if "=" in word]
            return next((value for key, value in words if key == "JobState"), None)
        if time.monotonic() >= end:
            raise NoAnswerError(str(reason)) from reason
        if not is_told:
            logger.warning("SLURM does not tell the state of job %s (%s); it is asked again", job, reason)
            is_told = True
        time.sleep(_RETRY_SECONDS)


def _scontrol(*words: str) -> str:
    """Run scontrol and return what it prints.

    Raises:
        NoAnswerError: the controller is away, or this machine has no room for a process now.
        _RefusedError: it refuses, or there is no scontrol here, so that no job of SLURM can be known.
    """
    command = ["scontrol", *words]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise _RefusedError(f"{_NO_SUCH_JOB}: there is no scontrol on this machine") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoAnswerError(str(error)) from error
    if not done.returncode:
        return done.stdout
    said = " ".join(done.stderr.split()) or f"status {done.returncode}"
    raise (NoAnswerError if any(words in said.lower() for words in _AWAY) else _RefusedError)(said)
