"""Many runs one after another: each a process of its own, each a row, whatever becomes of it.

Started again in its directory, a sweep goes on: what is done stays done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.resolve import save
from runner.config.schema import RunConfig
from runner.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    Problem,
    RequestError,
    RunnerError,
    raise_problems,
)
from runner.launch.failure import status_of
from runner.launch.prepare import CONFIG_FILE, check_elsewhere
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.restart import from_newest
from runner.launch.run_directory import create_run_directory, job_directory, run_directory_problems
from runner.launch.slurm.submit import needs_sbatch
from runner.launch.supervise import (
    INTERRUPT_GRACE_SECONDS,
    PREEMPTING_SIGNALS,
    ProcessSpec,
    name_of_signal,
    supervise,
)
from runner.record import RunRecord, environment, finish_failed
from runner.report.ledger import LEDGER_FILE, Job, Ledger, running

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["JOB_MODULE", "distinguishing", "sweep"]

logger = logging.getLogger(__name__)

JOB_MODULE = "runner.launch.job"
# A job ends its own ranks first; only then may it be killed.
_JOB_GRACE_SECONDS = INTERRUPT_GRACE_SECONDS + 5.0
_NO_FAILURE = ("ok", "unsupported")
_RETRIED = ("failed", "out_of_memory", "unsupported")
_REFRESHES_PER_SECOND = 0.5


@dataclass(frozen=True, slots=True)
class _Request:
    """``config`` is None where the request is wrong by itself; ``problems`` say why."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    problems: tuple[Problem, ...] = ()

    @property
    def key(self) -> str:
        """By which the sweep's ledger knows it."""
        from runner.config.resolve import fingerprint

        if self.config is not None:
            return fingerprint(self.config)
        return hashlib.sha256(json.dumps(sorted(self.overrides)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What is the same for all jobs."""

    directory: Path
    command: str
    entry: str
    retry: str | None
    on_failure: str
    hides_output: bool
    array: Mapping[str, Any] | None


def sweep(
    override_lists: Sequence[Sequence[str]],
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
    plugins: Sequence[str] = (),
) -> int:
    """Run one job per list of overrides, in ``<run_dir>/0, 1, ...``, and show the table of all.

    An unsupported combination leaves a record that says so. In the directory of an earlier start, jobs that are done
    are skipped and jobs that were cut go on; ``sweep_retry`` says what becomes of those that failed.

    Args:
        override_lists: every job's overrides, all of them; at least one job.
        command: what the user typed, for the records.
        entry: see :func:`runner.launch.start.train`.
        console: where the table is shown; default standard output.
        plugins: words about Hydra's plugins (:mod:`runner.launch.hydra`); without any, job follows job on this machine.

    Returns:
        1 if a job failed, 75 if the sweep was preempted, 130 if it was interrupted, else 0.

    Raises:
        RequestError: no job at all can be resolved, or the sweep's directory cannot be used.
    """
    from rich.console import Console

    requests = [_resolved(overrides) for overrides in override_lists]
    place = next((request.config for request in requests if request.config is not None), None)
    if place is None:
        raise RequestError(requests[0].problems)
    continues = place.run_dir is not None and Path(place.run_dir, LEDGER_FILE).is_file()
    problems = run_directory_problems(place.name, place.run_dir, continues=continues)
    raise_problems([*problems, *_dry_problems(requests)])
    array = _array_settings(place, requests, plugins)
    directory = create_run_directory(place.name, place.run_dir)
    console = console or Console()
    one = _Sweep(directory, command, entry, place.sweep_retry, place.sweep_on_failure, console.is_terminal, array)
    with _alone(directory):
        logger.info("sweep directory: %s", directory)
        wanted = [(request.key, shown) for request, shown in zip(requests, distinguishing(override_lists), strict=True)]
        ledger, jobs = _ledger(directory).entered(wanted)
        ledger.save(directory)
        with _live_table(directory, console):
            status = _run_all(one, list(zip(jobs, requests, strict=True)))
    console.print(_table(directory))
    return status


def distinguishing(override_lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of each list, the overrides that not all lists have."""
    common = set.intersection(*(set(overrides) for overrides in override_lists)) if override_lists else set()
    return [[override for override in overrides if override not in common] for overrides in override_lists]


def _resolved(overrides: Sequence[str]) -> _Request:
    from runner.plan.ordered import resolve_request

    try:
        return _Request(tuple(overrides), resolve_request(overrides))
    except RequestError as error:
        return _Request(tuple(overrides), None, error.problems)


def _dry_problems(requests: Sequence[_Request]) -> list[Problem]:
    if not any(request.config is not None and request.config.launcher.dry_run for request in requests):
        return []
    why = "A sweep submits one job after the other"
    return [Problem("launcher.dry_run", True, "belongs to a single run", why, "launcher.dry_run=false")]


def _array_settings(place: RunConfig, requests: Sequence[_Request], plugins: Sequence[str]) -> Mapping[str, Any] | None:
    """Of Hydra's launcher, where the sweep is an array's."""
    if not plugins:
        return None
    from runner.launch.hydra.array import array_problems
    from runner.launch.hydra.settings import LAUNCHER, plugin_settings

    settings = plugin_settings(LAUNCHER, plugins, place.name)
    if settings is not None:
        raise_problems(array_problems(settings, [one.config for one in requests if one.config is not None]))
        needs_sbatch("hydra/launcher", "submitit_slurm")
    return settings


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep others from running the sweep.

    Raises:
        RequestError: another process does.
    """
    with contextlib.ExitStack() as held:
        try:
            alone = held.enter_context(running(directory))
        except OSError as error:
            logger.warning("%s has no locks (%s): see to it that the sweep is started once at a time", directory, error)
            alone = True
        if not alone:
            why = "Another process runs this sweep: `runner report` shows how far it is"
            raise_problems([Problem("run_dir", directory, "must not be in use", why, f"run_dir={directory}_again")])
        yield


def _ledger(directory: Path) -> Ledger:
    try:
        return Ledger.load(directory)
    except ValueError as error:
        raise_problems([Problem("run_dir", directory, "must hold a sweep", str(error), f"run_dir={directory}_again")])
        raise


def _run_all(one: _Sweep, jobs: Sequence[tuple[Job, _Request]]) -> int:
    """Run what is left to run; the sweep's exit status."""
    due = [(job, request) for job, request in jobs if not _is_done(one, job)]
    if len(due) < len(jobs):
        logger.info("%d of %d jobs are done already", len(jobs) - len(due), len(jobs))
    if one.array is not None:
        return _run_array(one, due, jobs)
    for at, (job, request) in enumerate(due):
        logger.info("job %d, %d of %d to run: %s", job.number, at + 1, len(due), " ".join(job.overrides))
        interrupted_by = _run(one, job, request)
        if interrupted_by is not None:
            return EXIT_PREEMPTED if interrupted_by in PREEMPTING_SIGNALS else EXIT_INTERRUPTED
        if _failed(one, job) and one.on_failure == "stop":
            logger.error("job %d failed, and sweep_on_failure = stop: %d are left", job.number, len(due) - at - 1)
            break
    return _verdict(one, jobs)


def _verdict(one: _Sweep, jobs: Sequence[tuple[Job, _Request]]) -> int:
    failed = any(_failed(one, job) for job, _ in jobs)
    return EXIT_FAILED if failed and one.on_failure != "ignore" else EXIT_OK


def _run_array(one: _Sweep, due: Sequence[tuple[Job, _Request]], jobs: Sequence[tuple[Job, _Request]]) -> int:
    """Submit what is due, follow it and what an earlier start has submitted; the sweep's exit status."""
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
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return _verdict(one, jobs)


def _to_submit(job_dir: Path, config: RunConfig) -> RunConfig | None:
    """The request as its ranks start or go on; None, and the record says why, where it is wrong."""
    try:
        check_elsewhere(config, place_is_made=True)
        config = from_newest(config)
    except RunnerError as error:
        finish_failed(job_dir, status_of(error.exit_status), str(error))
        logger.error("%s", error)
        return None
    save(config, job_dir / CONFIG_FILE)
    return config


def _record(one: _Sweep, job: Job) -> RunRecord | None:
    try:
        return RunRecord.load(one.directory / str(job.number))
    except (FileNotFoundError, ValueError):
        return None


def _is_done(one: _Sweep, job: Job) -> bool:
    record = _record(one, job)
    if record is None:
        return False
    return record.status == "ok" or (record.status in _RETRIED and one.retry is None)


def _failed(one: _Sweep, job: Job) -> bool:
    record = _record(one, job)
    return record is not None and record.status not in _NO_FAILURE


def _begin(one: _Sweep, job: Job, request: _Request) -> tuple[Path, RunConfig] | None:
    """Make a job's directory and put down its request; None where that is wrong by itself."""
    from runner.config.resolve import fingerprint, to_container

    job_dir = job_directory(one.directory, job.number)
    record = _record(one, job) or RunRecord()
    record = record.replace(
        command=one.command, **environment(), extras=record.extras | {"overrides": list(job.overrides)}
    )
    if request.config is None:
        reason = "\n".join(problem.line() for problem in request.problems)
        record.replace(status="unsupported", reason=reason).save(job_dir)
        logger.error("%s", reason)
        return None
    config = replace(request.config, run_dir=str(job_dir))
    record = record.replace(status="running", reason=None, config=to_container(config), fingerprint=fingerprint(config))
    record.save(job_dir)
    save(config, job_dir / CONFIG_FILE)
    return job_dir, config


def _run(one: _Sweep, job: Job, request: _Request) -> int | None:
    """Run a job to its end, with the details in its record; returns the signal that the sweep was stopped by."""
    begun = _begin(one, job, request)
    if begun is None:
        return None
    job_dir, _ = begun
    log = job_dir / "logs" / "job.log" if one.hides_output else None
    spec = ProcessSpec([sys.executable, "-m", JOB_MODULE, str(job_dir), one.entry], {}, log=log)
    ending = supervise([spec], interrupt_grace_seconds=_JOB_GRACE_SECONDS)
    _account(job_dir, ending.returncodes[0], ending.interrupted_by)
    return ending.interrupted_by


def _account(job_dir: Path, code: int, interrupted_by: int | None) -> None:
    """Say in the record what the job could not."""
    status = RunRecord.load(job_dir).status
    if interrupted_by is not None:
        if status in ("running", "interrupted"):  # the job itself knows the sweep's signal only
            finish_failed(job_dir, "interrupted", f"stopped by {name_of_signal(interrupted_by)}")
    elif status == "running":
        how = name_of_signal(-code) if code < 0 else f"status {code}"
        finish_failed(job_dir, "failed", f"the job's process ended with {how}")


def _table(directory: Path) -> object:
    from runner.report.read import read_report
    from runner.report.tables import runs_table

    return runs_table(read_report(directory))


@contextlib.contextmanager
def _live_table(directory: Path, console: Console) -> Iterator[None]:
    """On a terminal, show how far every job is while the block runs; the jobs' own words are in their logs then."""
    if not console.is_terminal:
        yield
        return
    from rich.live import Live

    def shown() -> object:
        return _table(directory)

    with Live(
        get_renderable=shown,  # type: ignore[arg-type]  # a renderable is anything with __rich_console__
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield
