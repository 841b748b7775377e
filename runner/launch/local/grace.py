"""How long a run may take to stop: to the end of its step, and to save."""

from __future__ import annotations

import contextlib
import os
import time

from runner.config.schema import LauncherConfig

__all__ = ["grace_seconds"]

_END_VARIABLE = "SLURM_JOB_END_TIME"  # seconds since the epoch: sbatch(1), OUTPUT ENVIRONMENT VARIABLES
_RESERVE_SECONDS = 5.0  # before the end of the job, to end the ranks and to write the record


def grace_seconds(launcher: LauncherConfig) -> float:
    """Seconds from the request to stop until the ranks are killed, as it is now.

    Without ``launcher.grace_seconds`` it is what a scheduler's warning allows: ``launcher.signal_seconds``, by default
    120, or all the time that is left in the SLURM job in which this process runs. More than
    ``launcher.step_timeout_seconds`` has no use, because a step that takes longer has failed.
    """
    if launcher.grace_seconds is not None:
        return launcher.grace_seconds
    left = 0.0
    with contextlib.suppress(KeyError, ValueError):
        left = float(os.environ[_END_VARIABLE]) - time.time() - _RESERVE_SECONDS
    return min(max(launcher.signal_seconds, left), launcher.step_timeout_seconds)
