"""Submits a run as a batch job and follows it."""

from __future__ import annotations

import logging
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.config.compose.resolve import save
from runner.config.schema import RunConfig
from runner.errors import (
    EXIT_DOES_NOT_FIT,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_WRONG_REQUEST,
    Problem,
    RunFailedError,
    raise_problems,
)
from runner.launch.processes.stops import signal_of
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.directory import OUTPUTS, create_run_directory
from runner.launch.run.going_on import short_path
from runner.launch.run.lock import refuse_if_in_use
from runner.launch.run.prepare import CONFIG_FILE, check_elsewhere, write_submitted
from runner.launch.run.resume import with_checkpoint
from runner.launch.run.show import show
from runner.launch.slurm.capacity import refuse_too_large
from runner.launch.slurm.ended import JOB, POLL_SECONDS, SETTLED, complete_record
from runner.launch.slurm.requeue import ENDED, job_state
from runner.launch.slurm.script import LOG_FILE, SCRIPT_FILE, batch_script
from runner.launch.slurm.step import without_job
from runner.record import RunRecord, Status, finish_failed, write_atomically

__all__ = ["follow", "needs_sbatch", "print_script", "submit", "submit_in", "unfinished_job"]

logger = logging.getLogger(__name__)

_UNKNOWN_LIMIT = 30  # polls in a row without an answer from SLURM
_EXIT_OF: Mapping[Status, int] = {
    "ok": EXIT_OK,
    "failed": EXIT_FAILED,
    "out_of_memory": EXIT_DOES_NOT_FIT,
    "unsupported": EXIT_WRONG_REQUEST,
    "preempted": EXIT_PREEMPTED,
    "interrupted": EXIT_INTERRUPTED,
}


class NotSubmittedError(RunFailedError):
    """SLURM has refused the job."""


def print_script(config: RunConfig, *, entry: str = TRAIN_ENTRY) -> int:
    """Check the request and print its batch script; nothing is written or submitted.

    Raises:
        RequestError, DoesNotFitError: the same errors as those of a run that is not submitted.
    """
    check_elsewhere(config)
    run_dir = Path(config.run_dir or OUTPUTS / config.name / "<time>").absolute()
    sys.stdout.write(_script(config, run_dir, entry))
    return EXIT_OK


def submit(config: RunConfig, *, command: str, entry: str = TRAIN_ENTRY) -> int:
    """Check the request, make its directory and submit it; with ``launcher.wait`` follow it to its end.

    Returns:
        0 once it is submitted, or the exit status of the followed run.

    Raises:
        RequestError, DoesNotFitError: the same errors as those of a run that is not submitted, before anything is
            written or submitted.
    """
    check_elsewhere(config)
    needs_sbatch("launcher", "slurm")
    refuse_too_large(config)
    if config.run_dir is not None:
        refuse_if_in_use(Path(config.run_dir))
    config = with_checkpoint(config)
    wanted = Path(config.run_dir) if config.run_dir is not None else OUTPUTS / config.name
    before = next(folder for folder in (wanted.absolute(), *wanted.absolute().parents) if folder.exists())
    run_dir = create_run_directory(config.name, config.run_dir)
    try:
        status = submit_in(run_dir, config, command=command, entry=entry, wait=config.launcher.wait)
    except NotSubmittedError:
        _remove_new(run_dir, before)
        raise
    if config.launcher.wait and status == EXIT_OK:
        show(RunRecord.load(run_dir), short_path(run_dir))
    return status


def _remove_new(run_dir: Path, before: Path) -> None:
    """Remove the directory of a run that was not submitted, and the empty ones above it that were made for it."""
    if run_dir == before:  # of a run that was to be continued
        return
    shutil.rmtree(run_dir)
    for folder in run_dir.parents:
        if folder == before or any(folder.iterdir()):
            return
        folder.rmdir()


def submit_in(run_dir: Path, config: RunConfig, *, command: str, entry: str, wait: bool) -> int:
    """Submit a checked request in a directory that exists; otherwise like :func:`submit`."""
    config = replace(config, run_dir=str(run_dir))
    write_submitted(config, run_dir, command=command)
    save(config, run_dir / CONFIG_FILE)
    script = run_dir / SCRIPT_FILE
    write_atomically(script, _script(config, run_dir, entry))
    try:
        job = _sbatch(script)
    except NotSubmittedError as error:
        finish_failed(run_dir, "failed", str(error))
        raise
    record = RunRecord.load(run_dir)
    record.replace(extras=record.extras | {JOB: job}).save(run_dir)
    logger.info("submitted as SLURM job %s: %s", job, run_dir)
    if wait:
        return follow(job, run_dir)
    log, place = (shlex.quote(str(short_path(path))) for path in (run_dir / LOG_FILE, run_dir))
    logger.info(
        "its output: tail -F %s; its place in the queue: squeue -j %s; its end: runner report %s", log, job, place
    )
    return EXIT_OK


def needs_sbatch(path: str, value: str) -> None:
    """Refuse an override that needs SLURM on a machine without it.

    Raises:
        RequestError: sbatch is not found.
    """
    if shutil.which("sbatch") is None:
        raise_problems([Problem(path, value, "needs sbatch", "It is not on the PATH", "launcher=local")])


def _script(config: RunConfig, run_dir: Path, entry: str) -> str:
    command = [sys.executable, "-u", "-m", "runner.launch.slurm.job", str(run_dir), entry]
    return batch_script(config, run_dir, command, working_directory=Path.cwd())


def _sbatch(script: Path) -> str:
    with without_job():
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise NotSubmittedError(f"sbatch did not take the job: {said}. launcher.dry_run=true prints its script")
    return done.stdout.strip().split(";")[0]


def unfinished_job(run_dir: Path) -> str | None:
    """The number of the job as which the directory's run was submitted, if SLURM has not ended it yet."""
    job = RunRecord.load(run_dir).extras.get(JOB)
    state = job_state(job) if isinstance(job, str) else None
    return job if state is not None and state not in ENDED else None


def follow(job: str, run_dir: Path) -> int:
    """Show the job's log until it has ended; Ctrl-C cancels the job. Returns the run's exit status."""
    log = _Tail(run_dir / LOG_FILE)
    try:
        state = _wait(job, log)
    except KeyboardInterrupt as error:
        if signal_of(error) != signal.SIGINT:  # a terminal that is closed leaves the job running
            raise
        subprocess.run(["scancel", job], stdin=subprocess.DEVNULL, check=False)
        finish_failed(run_dir, "interrupted", f"stopped by SIGINT: SLURM job {job} is cancelled")
        return EXIT_INTERRUPTED
    log.show()
    record = complete_record(run_dir, job, state)
    if record.status != "ok":
        logger.error("%s", record.reason)
    return _EXIT_OF[record.status]


def _wait(job: str, log: _Tail) -> str:
    """Wait until the job has ended for good, and return its last state."""
    shown, unknown, ended = "", 0, 0
    while unknown < _UNKNOWN_LIMIT and ended < SETTLED:
        state = job_state(job)
        unknown = unknown + 1 if state is None else 0
        ended = ended + 1 if state in ENDED else 0
        if state is not None and state != shown:
            logger.info("SLURM job %s: %s", job, state.lower())
            shown = state
        log.show()
        time.sleep(POLL_SECONDS)
    return shown or "unknown"


class _Tail:
    """Passes on the new text of a growing file to standard error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def show(self) -> None:
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                new = file.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        sys.stderr.write(new.decode(errors="replace"))
        sys.stderr.flush()
