"""One rank of a submitted job: ``python -m runner.launch.slurm.job RUN_DIR [MODULE:FUNCTION]``, started by srun."""

from __future__ import annotations

import faulthandler
import logging
import sys
from pathlib import Path

from runner.errors import EXIT_WRONG_REQUEST, RunnerError
from runner.launch.attach import attach_step
from runner.launch.failure import status_of
from runner.launch.rank import TRAIN_ENTRY, leave
from runner.launch.run.lock import InUseError
from runner.launch.run.prepare import CONFIG_FILE
from runner.launch.slurm.step import current_step
from runner.record import RunRecord, finish_failed

__all__ = ["main"]

logger = logging.getLogger(__name__)


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
