"""Runs one job of a sweep in its own process: ``python -m runner.launch.sweep.job JOB_DIR [MODULE:FUNCTION]``.

The sweep has written the job's configuration and first record. Whatever happens here becomes one row of its table.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, RunnerError
from runner.late import import_late
from runner.launch.failure import RankFailure, status_of
from runner.launch.local.ranks import import_ahead, stopped_early
from runner.launch.processes.stops import end_undisturbed, listen_for_stops, signal_of
from runner.launch.processes.supervise import die_with_parent
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.lock import InUseError, alone_in
from runner.launch.run.prepare import CONFIG_FILE, check_elsewhere, prepare, tell_plan
from runner.launch.run.restart import from_newest, go_on, has_begun
from runner.launch.run.resume import with_checkpoint
from runner.launch.run.same_stages import with_stages_before
from runner.launch.start import run_in
from runner.launch.sweep.layouts import with_layout
from runner.noise import hide_noise
from runner.record import RunRecord, finish_failed

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main(job_dir: Path, entry: str = TRAIN_ENTRY) -> int:
    """Check and run the job and return its exit status; the record gets the same status."""
    hide_noise()
    import_late()
    record = RunRecord.load(job_dir)
    with contextlib.ExitStack() as ended:
        return _run(job_dir, record, entry, ended)


def _run(job_dir: Path, record: RunRecord, entry: str, ended: contextlib.ExitStack) -> int:
    from runner.config.compose.resolve import load

    try:
        config = load(job_dir / CONFIG_FILE)
        if config.launcher.name == "slurm":
            return _on_slurm(job_dir, config, record.command or "", entry)
        ended.enter_context(alone_in(job_dir, record.command or ""))
        config = with_layout(config, job_dir)
        template = ended.enter_context(import_ahead(config, entry))
        if has_begun(job_dir):  # the job was interrupted before, or is tried again
            config, plan = go_on(config, job_dir, command=record.command or "")
        else:
            plan = prepare(config, place_is_made=True)
            config = with_checkpoint(config)
            plan = with_stages_before(config, plan)
            tell_plan(plan)
    except InUseError as error:  # the record belongs to the command that works there
        logger.error("%s", error)
        return error.exit_status
    except RunnerError as error:
        finish_failed(job_dir, status_of(error.exit_status), str(error))
        logger.error("%s", error)
        return error.exit_status
    except KeyboardInterrupt as error:
        end_undisturbed()
        outcome = stopped_early(job_dir, signal_of(error))
        finish_failed(job_dir, outcome.status, outcome.reason or outcome.status)
        return outcome.exit_status
    except Exception as error:
        failure = RankFailure.of(error)
        finish_failed(job_dir, status_of(failure.exit_status), f"could not be planned: {failure.summary()}")
        logger.exception("the job could not be planned")
        return failure.exit_status or EXIT_FAILED
    from rich.console import Console

    # The sweep shows one table of all jobs.
    console = Console(quiet=True)
    return run_in(job_dir, config, plan, command=record.command or "", entry=entry, console=console, template=template)


def _on_slurm(job_dir: Path, config: RunConfig, command: str, entry: str) -> int:
    """Submit the job as a batch job and wait for it; the sweep continues with the next job when it has ended.

    A batch job that an earlier start of the sweep submitted, and that has not ended, is followed instead.
    """
    from runner.launch.slurm.capacity import refuse_too_large
    from runner.launch.slurm.submit import follow, submit_in, unfinished_job

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the sweep's SIGTERM cancels the batch job
    submitted = unfinished_job(job_dir)
    if submitted is not None:
        logger.info("SLURM job %s has been submitted already", submitted)
        return follow(submitted, job_dir)
    config = with_layout(config, job_dir)
    check_elsewhere(config, place_is_made=True)
    refuse_too_large(config)
    config = from_newest(config)
    return submit_in(job_dir, config, command=command, entry=entry, wait=True)


if __name__ == "__main__":
    die_with_parent()
    listen_for_stops()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:3]))
