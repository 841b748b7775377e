"""Runs many runs one after another: each is a process of its own and a row of the table, however it ends.

A sweep that is started again in its directory continues; jobs that are done are not repeated.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.schema import RunConfig
from runner.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, Problem, RequestError, raise_problems, typed_word
from runner.launch.needs.packages import missing_packages
from runner.launch.rank import TRAIN_ENTRY
from runner.launch.run.directory import create_run_directory, run_directory_problems
from runner.launch.run.going_on import command_that_continues, short_path
from runner.launch.slurm.submit import needs_sbatch
from runner.launch.sweep.jobs import Request, Sweep, run_all
from runner.launch.sweep.layouts import search_problems
from runner.launch.sweep.live import in_place
from runner.report.best import figure_of
from runner.report.ledger import LEDGER_FILE, Job, Ledger, running
from runner.report.read import read_report
from runner.report.tables import runs_table

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["distinguishing", "run_sweep", "show_table", "sweep"]

logger = logging.getLogger(__name__)


def sweep(
    override_lists: Sequence[Sequence[str]],
    *,
    command: str,
    entry: str = TRAIN_ENTRY,
    console: Console | None = None,
    plugins: Sequence[str] = (),
) -> int:
    """Run one job per list of overrides, in ``<run_dir>/0, 1, ...``, and show a table of all jobs.

    An unsupported combination leaves a record that says so. In the directory of an earlier start, jobs that are done
    are skipped and interrupted jobs continue; ``sweep_retry`` decides about those that failed.

    Args:
        override_lists: for every job all of its overrides; at least one job.
        command: what the user typed, for the records.
        entry: see :func:`runner.launch.start.train`.
        console: where the table is shown; default standard output.
        plugins: words about Hydra's plugins (:mod:`runner.launch.hydra`); without any, the jobs run one after another
            on this machine.

    Returns:
        1 if a job failed, 2 if every job was refused, 75 if the sweep was preempted, 130 if it was interrupted, else 0.

    Raises:
        RequestError: no job can be resolved, a package is missing, or the sweep's directory cannot be used.
    """
    return run_sweep(
        override_lists,
        shown=distinguishing(override_lists),
        command=command,
        entry=entry,
        console=console,
        plugins=plugins,
    )[0]


def run_sweep(
    override_lists: Sequence[Sequence[str]],
    *,
    shown: Sequence[Sequence[str]],
    command: str,
    entry: str,
    console: Console | None,
    plugins: Sequence[str],
) -> tuple[int, list[Path]]:
    """Run a sweep like :func:`sweep`; return its exit status and the directory of each job.

    Args:
        shown: for every job, the overrides that its row shows.
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
    raise_problems(_missing(requests) if array is None else ())
    directory = create_run_directory(place.name, place.run_dir)
    console = console or Console()
    one = Sweep(directory, command, entry, place.sweep_retry, place.sweep_on_failure, console.is_terminal, array)
    with _alone(directory):
        logger.info("sweep directory: %s", directory)
        _tell_unreadable(requests)
        wanted = [(request.key, words) for request, words in zip(requests, shown, strict=True)]
        before = _ledger(directory)
        ledger, jobs = before.entered(wanted, _common(override_lists))
        ledger.save(directory)
        _tell_others(before, ledger, jobs)
        with in_place(partial(read_report, directory), console):
            status = run_all(one, list(zip(jobs, requests, strict=True)))
    show_table(directory, console)
    if status in (EXIT_INTERRUPTED, EXIT_PREEMPTED):
        logger.error("to continue: %s", command_that_continues(command, directory))
    return status, [directory / str(job.number) for job in jobs]


def distinguishing(override_lists: Sequence[Sequence[str]]) -> list[list[str]]:
    """For each list, the overrides that are not in all lists."""
    common = set.intersection(*(set(overrides) for overrides in override_lists)) if override_lists else set()
    return [[override for override in overrides if override not in common] for overrides in override_lists]


def _common(override_lists: Sequence[Sequence[str]]) -> list[str]:
    """The overrides that are in all lists, in order."""
    return [one for one in override_lists[0] if all(one in others for others in override_lists[1:])]


def _tell_others(before: Ledger, after: Ledger, jobs: Sequence[Job]) -> None:
    """Say that new jobs stand beside those of an earlier start, and in which overrides the two starts differ."""
    new = [job for job in jobs if job.number >= len(before.jobs)]
    known = {one for job in before.jobs for one in job.common}
    if not known or not new or not new[0].common:
        return
    told = after.told()
    here = [one for one in told[new[0].number] if one in new[0].common and one not in known]
    there = dict.fromkeys(
        one for job in before.jobs for one in told[job.number] if one in job.common and one not in new[0].common
    )
    if here or there:
        logger.info(
            "%d of %d jobs are new beside the %d of earlier starts, which had %s; these have %s",
            *(len(new), len(jobs), len(before.jobs), " ".join(there) or f"no {' '.join(here)}"),
            " ".join(here) or f"no {' '.join(there)}",
        )


def _resolved(overrides: Sequence[str]) -> Request:
    from runner.plan.requested_schedule import resolve_request

    try:
        config = resolve_request(overrides)
    except RequestError as error:
        return Request(tuple(overrides), None, error.problems)
    for entry in config.sweep_without:
        words, _, why = entry.partition(": ")
        if set(words.split()) <= set(overrides):
            problem = Problem("sweep_without", words, "leaves this job out", why, "sweep_without=[]")
            return Request(tuple(overrides), config, (problem,))
    try:
        search_problems(overrides)
    except RequestError as error:
        return Request(tuple(overrides), config, error.problems)
    return Request(tuple(overrides), config)


def _tell_unreadable(requests: Sequence[Request]) -> None:
    """Say before the first job which mistakes make jobs impossible; each such job is also told at its turn."""
    wrong = Counter(problem.line() for one in requests for problem in one.problems if problem.path != "sweep_without")
    for line, count in wrong.items():
        logger.warning("%d of %d jobs cannot be run: %s", count, len(requests), line)


def _dry_problems(requests: Sequence[Request]) -> list[Problem]:
    if not any(request.config is not None and request.config.launcher.dry_run for request in requests):
        return []
    why = "A sweep submits one job after the other"
    return [Problem("launcher.dry_run", True, "belongs to a single run", why, "launcher.dry_run=false")]


def _missing(requests: Sequence[Request]) -> Iterable[Problem]:
    """One problem for every package that jobs on this machine need and that is not installed."""
    found: dict[str, Problem] = {}
    for config in (request.config for request in requests if not request.problems):
        if config is not None and config.launcher.name == "local":
            found = missing_packages(config) | found
    return found.values()


def _array_settings(place: RunConfig, requests: Sequence[Request], plugins: Sequence[str]) -> Mapping[str, Any] | None:
    """The settings of Hydra's launcher if the sweep runs as an array, else None."""
    if not plugins:
        return None
    from runner.launch.hydra.array import array_problems
    from runner.launch.hydra.settings import launcher_settings

    settings = launcher_settings(plugins, place.name)
    if settings is not None:
        raise_problems(
            array_problems(settings, [one.config for one in requests if one.config is not None and not one.problems])
        )
        needs_sbatch("hydra/launcher", "submitit_slurm")
    return settings


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Keep other processes from running the same sweep.

    Raises:
        RequestError: another process runs it.
    """
    with contextlib.ExitStack() as held:
        try:
            alone = held.enter_context(running(directory))
        except OSError as error:
            logger.warning("%s has no locks (%s): see to it that the sweep is started once at a time", directory, error)
            alone = True
        if not alone:
            why = "Another process runs this sweep: `runner report` shows how far it is"
            raise_problems(
                [Problem("run_dir", directory, "must not be in use", why, typed_word("run_dir", f"{directory}_again"))]
            )
        yield


def _ledger(directory: Path) -> Ledger:
    try:
        return Ledger.load(directory)
    except ValueError as error:
        raise_problems(
            [
                Problem(
                    "run_dir", directory, "must hold a sweep", str(error), typed_word("run_dir", f"{directory}_again")
                )
            ]
        )
        raise


def show_table(directory: Path, console: Console) -> None:
    """Print the table of all jobs that were ever requested in the directory, and what can be done with them next."""
    found = read_report(directory)
    console.print(runs_table(found))
    place = str(short_path(directory))
    lines = {"report": ["report", place, "--sort", "loss"]}
    figure = figure_of(found.runs)
    if figure is not None:
        lines = {"report": ["report", place, "--sort", figure]}
        lines["best weights"] = ["export", place, "best.safetensors", "--best", figure]
    for name, words in lines.items():
        console.print(f"{name:12}  {shlex.join(['runner', *words])}", markup=False, highlight=False, soft_wrap=True)
