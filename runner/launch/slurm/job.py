"""Ranks that srun starts: those of a command, and those of a submitted job.

One of a submitted job is ``python -m runner.launch.slurm.job RUN_DIR [MODULE:FUNCTION]``.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import EXIT_WRONG_REQUEST, RunnerError, raise_problems
from runner.launch.attach import grace_problems, run_attached, world_size_problems
from runner.launch.failure import status_of
from runner.launch.processes.leaving import leave
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.lock import InUseError
from runner.launch.run.prepare import CONFIG_FILE
from runner.launch.slurm.step import Step, current_step
from runner.record import RunRecord, finish_failed
from runner.training.stop_signals import StopSignals

__all__ = ["attach_step", "main"]

logger = logging.getLogger(__name__)


def attach_step(config: RunConfig, step: Step, *, command: str, entry: str, place_is_made: bool = False) -> int:
    """Run this process as one of the ranks that srun started; see :func:`runner.launch.attach.attach`.

    When the job is told to stop, the ranks save a checkpoint at the end of a step. Rank 0 then queues the job again as
    its last action.

    Args:
        place_is_made: whether the process that submitted the job has already made the run directory.

    Raises:
        RunFailedError: the ranks could not reach one another.
    """
    signals = StopSignals.listen((signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM))
    if step.rank == 0:
        logger.info("%s", step.line(config))
    raise_problems([*step.problems(config), *world_size_problems(config, step.num_tasks), *grace_problems(config)])
    step.become_rank(os.environ)
    return run_attached(config, step, command=command, entry=entry, place_is_made=place_is_made, signals=signals)


def main(run_dir: Path, entry: str = TRAIN_ENTRY) -> int:
    """Run this task's rank and return its exit status; the record gets the same status."""
    from runner.config.compose.resolve import load

    step = current_step()
    if step is None:
        logger.error("no task of a SLURM step: start it with srun")
        return EXIT_WRONG_REQUEST
    command = RunRecord.load(run_dir).command or ""
    try:
        return attach_step(load(run_dir / CONFIG_FILE), step, command=command, entry=entry, place_is_made=True)
    except InUseError as error:  # the record belongs to the command that works there
        logger.error("%s", error)
        return error.exit_status
    except RunnerError as error:
        logger.error("%s", error)
        if RunRecord.load(run_dir).status == "running":
            finish_failed(run_dir, status_of(error.exit_status), str(error))
        return error.exit_status


if __name__ == "__main__":
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    leave(main(Path(sys.argv[1]), *sys.argv[2:3]))
