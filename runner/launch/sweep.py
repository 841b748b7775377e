"""Many runs one after another: each a process of its own, each a row, whatever becomes of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.schema import RunConfig
from runner.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Problem, RequestError, raise_problems
from runner.launch.prepare import CONFIG_FILE
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run_directory import create_run_directory, job_directory, run_directory_problems
from runner.launch.supervise import INTERRUPT_GRACE_SECONDS, ProcessSpec, name_of_signal, supervise
from runner.record import RunRecord, environment, finish_failed

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["distinguishing", "sweep"]

logger = logging.getLogger(__name__)

# A job ends its own ranks first; only then may it be killed.
_JOB_GRACE_SECONDS = INTERRUPT_GRACE_SECONDS + 5.0


@dataclass(frozen=True, slots=True)
class _Job:
    """``config`` is None where the request is wrong by itself; ``problems`` say why."""

    overrides: tuple[str, ...]
    config: RunConfig | None
    problems: tuple[Problem, ...] = ()


def sweep(
    override_lists: Sequence[Sequence[str]],
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
) -> int:
    """Run one job per list of overrides, in ``<run_dir>/0, 1, ...``, and show the table of all.

    A job that fails does not stop the others; an unsupported combination leaves a record that says so.

    Args:
        override_lists: every job's overrides, all of them; at least one job.
        command: what the user typed, for the records.
        entry: see :func:`runner.launch.start.train`.
        console: where the table is shown; default standard output.

    Returns:
        1 if a job failed, 130 if the sweep was interrupted, else 0.

    Raises:
        RequestError: no job at all can be resolved, or the sweep's directory cannot be used.
    """
    jobs = [_resolved(overrides) for overrides in override_lists]
    place = next((job.config for job in jobs if job.config is not None), None)
    if place is None:
        raise RequestError(jobs[0].problems)
    raise_problems([*run_directory_problems(place.name, place.run_dir), *_dry_problems(jobs)])
    sweep_dir = create_run_directory(place.name, place.run_dir)
    logger.info("sweep directory: %s", sweep_dir)
    shown = distinguishing(override_lists)
    statuses: list[int] = []
    for number, job in enumerate(jobs):
        logger.info("job %d of %d: %s", number, len(jobs), " ".join(shown[number]))
        statuses.append(_run(job, job_directory(sweep_dir, number), shown[number], command=command, entry=entry))
        if statuses[-1] == EXIT_INTERRUPTED:
            break
    _show(sweep_dir, console)
    if EXIT_INTERRUPTED in statuses:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if EXIT_FAILED in statuses else EXIT_OK


def distinguishing(override_lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """Of each list, the overrides that not all lists have."""
    common = set.intersection(*(set(overrides) for overrides in override_lists)) if override_lists else set()
    return [[override for override in overrides if override not in common] for overrides in override_lists]


def _resolved(overrides: Sequence[str]) -> _Job:
    from runner.plan.ordered import resolve_request

    try:
        return _Job(tuple(overrides), resolve_request(overrides))
    except RequestError as error:
        return _Job(tuple(overrides), None, error.problems)


def _dry_problems(jobs: Sequence[_Job]) -> list[Problem]:
    if not any(job.config is not None and job.config.launcher.dry_run for job in jobs):
        return []
    why = "A sweep submits one job after the other"
    return [Problem("launcher.dry_run", True, "belongs to a single run", why, "launcher.dry_run=false")]


def _run(job: _Job, job_dir: Path, shown: Sequence[str], *, command: str, entry: str) -> int:
    """0, 1 or 130, with the details in the job's record."""
    from runner.config.resolve import fingerprint, save, to_container

    record = RunRecord(command=command, **environment(), extras={"overrides": list(shown)})
    if job.config is None:
        reason = "\n".join(problem.line() for problem in job.problems)
        record.replace(status="unsupported", reason=reason).save(job_dir)
        logger.error("%s", reason)
        return EXIT_OK
    config = replace(job.config, run_dir=str(job_dir))
    record.replace(config=to_container(config), fingerprint=fingerprint(config)).save(job_dir)
    save(config, job_dir / CONFIG_FILE)
    spec = ProcessSpec([sys.executable, "-m", "runner.launch.job", str(job_dir), entry], {})
    ending = supervise([spec], interrupt_grace_seconds=_JOB_GRACE_SECONDS)
    if ending.interrupted_by is not None:
        return _close_interrupted(job_dir, ending.interrupted_by)
    code = ending.returncodes[0]
    status = RunRecord.load(job_dir).status
    if status == "running":
        how = name_of_signal(-code) if code < 0 else f"status {code}"
        finish_failed(job_dir, "failed", f"the job's process ended with {how}")
        return EXIT_FAILED
    return EXIT_OK if code == 0 or status == "unsupported" else EXIT_FAILED


def _close_interrupted(job_dir: Path, number: int) -> int:
    if RunRecord.load(job_dir).status in ("running", "interrupted"):  # the job itself knows the sweep's signal only
        finish_failed(job_dir, "interrupted", f"stopped by {name_of_signal(number)}")
    return EXIT_INTERRUPTED


def _show(sweep_dir: Path, console: Console | None) -> None:
    from rich.console import Console

    from runner.report.read import read_report
    from runner.report.tables import runs_table

    (console or Console()).print(runs_table(read_report(sweep_dir)))
