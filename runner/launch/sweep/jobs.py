"""Runs the remaining jobs of a sweep: one after another on this machine, or as a SLURM array."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.compose.resolve import fingerprint, save, to_container
from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_WRONG_REQUEST, Problem, RunnerError
from runner.launch.failure import status_of
from runner.launch.local.grace import grace_seconds
from runner.launch.local.ranks import stopped_by_another, stopped_early
from runner.launch.processes.stops import exit_status_of, name_of_signal, signal_of
from runner.launch.processes.supervise import ProcessSpec, supervise
from runner.launch.run.directory import job_directory
from runner.launch.run.prepare import CONFIG_FILE, check_elsewhere
from runner.launch.run.restart import from_newest
from runner.launch.sweep.layouts import asked, found_before, held, is_open
from runner.record import RunRecord, environment, finish_failed
from runner.report.ledger import Job

__all__ = ["JOB_MODULE", "Request", "Sweep", "run_all"]

logger = logging.getLogger(__name__)

JOB_MODULE = "runner.launch.sweep.job"
# Beyond the grace of its ranks: a job must have time to end them before it may be killed.
_JOB_GRACE_SECONDS = 5.0
_NO_FAILURE = ("ok", "unsupported")
_RETRIED = ("failed", "out_of_memory", "unsupported")


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one job. ``config`` is None if it cannot be resolved; ``problems`` say why the job is not run."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    problems: tuple[Problem, ...] = ()

    @property
    def key(self) -> str:
        """The identity of this job in the sweep's ledger."""
        if self.config is not None and not self.problems:
            known = fingerprint(self.config)
            return _hashed([known, *held(self.overrides)]) if is_open(self.config) else known
        return _hashed(sorted(self.overrides))


def _hashed(words: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Sweep:
    """The settings that all jobs of a sweep share."""

    directory: Path
    command: str
    entry: str
    retry: str | None
    on_failure: str
    hides_output: bool
    array: Mapping[str, Any] | None


def run_all(one: Sweep, jobs: Sequence[tuple[Job, Request]]) -> int:
    """Run the jobs that are not done, and return the exit status of the sweep."""
    due = [(job, request) for job, request in jobs if not _is_done(one, job)]
    if len(due) < len(jobs):
        logger.info("%d of %d jobs are done already", len(jobs) - len(due), len(jobs))
    if one.array is not None:
        return _run_array(one, due, jobs)
    for at, (job, request) in enumerate(due):
        overrides = f": {' '.join(job.overrides)}" if job.overrides else ""
        logger.info("job %d, %d of %d to run%s", job.number, at + 1, len(due), overrides)
        interrupted_by = _run(one, job, request)
        if interrupted_by is not None:
            return exit_status_of(interrupted_by)
        if _failed(one, job) and one.on_failure == "stop":
            logger.error("job %d failed, and sweep_on_failure = stop: %d are left", job.number, len(due) - at - 1)
            break
    return _verdict(one, jobs)


def _verdict(one: Sweep, jobs: Sequence[tuple[Job, Request]]) -> int:
    if one.on_failure == "ignore":
        return EXIT_OK
    if any(_failed(one, job) for job, _ in jobs):
        return EXIT_FAILED
    records = [_record(one, job) for job, _ in jobs]
    refused = all(record is not None and record.status == "unsupported" for record in records)
    return EXIT_WRONG_REQUEST if refused else EXIT_OK


def _run_array(one: Sweep, due: Sequence[tuple[Job, Request]], jobs: Sequence[tuple[Job, Request]]) -> int:
    """Submit the jobs that are due, follow them and those of an earlier start, and return the sweep's exit status."""
    from runner.launch.hydra.array import follow_jobs, submit_array, unfinished

    assert one.array is not None
    submitted = unfinished(one.directory)
    new: dict[int, tuple[Path, RunConfig]] = {}
    for job, request in due:
        begun = _begin(one, job, request) if job.number not in submitted else None
        config = _to_submit(*begun) if begun is not None else None
        if begun is not None and config is not None:
            new[job.number] = begun[0], config
    try:
        if new:
            submitted |= submit_array(one.array, new, one.directory, one.entry)
        follow_jobs(submitted, one.directory)
    except KeyboardInterrupt as error:
        return exit_status_of(signal_of(error))
    return _verdict(one, jobs)


def _to_submit(job_dir: Path, config: RunConfig) -> RunConfig | None:
    """The request as its ranks start or continue, or None if it is wrong; the record then says why."""
    try:
        check_elsewhere(config, place_is_made=True)
        config = from_newest(config)
    except RunnerError as error:
        finish_failed(job_dir, status_of(error.exit_status), str(error))
        logger.error("%s", error)
        return None
    save(config, job_dir / CONFIG_FILE)
    return config


def _record(one: Sweep, job: Job) -> RunRecord | None:
    try:
        return RunRecord.load(one.directory / str(job.number))
    except (FileNotFoundError, ValueError):
        return None


def _is_done(one: Sweep, job: Job) -> bool:
    record = _record(one, job)
    if record is None:
        return False
    return record.status == "ok" or (record.status in _RETRIED and one.retry is None)


def _failed(one: Sweep, job: Job) -> bool:
    record = _record(one, job)
    return record is not None and record.status not in _NO_FAILURE


def _begin(one: Sweep, job: Job, request: Request) -> tuple[Path, RunConfig] | None:
    """Make a job's directory and write its request; None if the job is not to be run."""
    job_dir = job_directory(one.directory, job.number)
    record = _record(one, job) or RunRecord()
    record = record.replace(
        command=one.command, **environment(), extras=record.extras | {"overrides": list(job.overrides)}
    )
    config = request.config
    if config is not None:
        extras = record.extras | asked(config, request.overrides)
        config = replace(found_before(config, request.overrides, record), run_dir=str(job_dir))
        record = record.replace(config=to_container(config), fingerprint=fingerprint(config), extras=extras)
    if config is None or request.problems:
        reason = "\n".join(problem.line() for problem in request.problems)
        record.replace(status="unsupported", reason=reason).save(job_dir)
        logger.error("%s", reason)
        return None
    record.replace(status="running", reason=None).save(job_dir)
    save(config, job_dir / CONFIG_FILE)
    return job_dir, config


def _run(one: Sweep, job: Job, request: Request) -> int | None:
    """Run a job to its end, with the details in its record; return the signal that stopped the sweep, or None."""
    begun = _begin(one, job, request)
    if begun is None:
        return None
    job_dir, config = begun
    log = job_dir / "logs" / "job.log" if one.hides_output else None
    spec = ProcessSpec([sys.executable, "-m", JOB_MODULE, str(job_dir), one.entry], {}, log=log)
    ending = supervise([spec], grace_seconds=lambda: grace_seconds(config.launcher) + _JOB_GRACE_SECONDS)
    _account(job_dir, ending.returncodes[0], ending.interrupted_by)
    return ending.interrupted_by


def _account(job_dir: Path, code: int, interrupted_by: int | None) -> None:
    """Complete the record of a job that could not do so itself."""
    record = RunRecord.load(job_dir)
    status = record.status
    if interrupted_by is not None:
        by_user = exit_status_of(interrupted_by) != EXIT_PREEMPTED
        if status == "running":
            outcome = stopped_early(job_dir, interrupted_by)
            finish_failed(job_dir, outcome.status, outcome.reason or outcome.status)
        elif status == "preempted" and by_user:  # the job knows what it saved, and only the sweep's own SIGTERM
            finish_failed(job_dir, "interrupted", stopped_by_another(record.reason or status, interrupted_by))
    elif status == "running":
        how = name_of_signal(-code) if code < 0 else f"status {code}"
        finish_failed(job_dir, "failed", f"the job's process ended with {how}")
