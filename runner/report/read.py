"""Reads the records under a directory: of one run or of the jobs of a sweep, also while they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.errors import Problem, raise_problems
from runner.record import RECORD_FILE, RunRecord, read_steps, step_seconds
from runner.report.ledger import LEDGER_FILE, Ledger, is_running

__all__ = ["Report", "Run", "differences", "is_sweep", "read_report", "wrong_directory"]

# Fields that say nothing about what a run does.
_NO_DIFFERENCE = ("run_dir", "resume")
_NOT_DONE = ("waiting", "running", "preempted", "interrupted")


@dataclass(frozen=True, slots=True)
class Run:
    """One record. ``name`` is the job's number in a sweep, else the directory's name."""

    name: str
    directory: Path
    record: RunRecord

    @property
    def loss(self) -> float | None:
        """Loss of the last optimizer step."""
        return self.record.loss[-1] if self.record.loss else None

    @property
    def val_loss(self) -> float | None:
        """Loss of the last validation."""
        return self.record.val_loss[-1][1] if self.record.val_loss else None

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last validation that has each of them, ``val_NAME`` to value."""
        last = {name: _last_value(pairs) for name, pairs in self.record.metrics.items()}
        return {name: value for name, value in last.items() if value is not None}

    @property
    def median_seconds(self) -> float | None:
        """Median seconds of an optimizer step."""
        value: float | None = self.record.step_seconds.get("median")
        return value

    @property
    def peak_memory_bytes(self) -> float | None:
        """Measured peak memory of the rank that needs most."""
        measured = self.record.peak_memory_bytes.get("measured") or []
        return max((value for value in measured if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class Report:
    """The records that were found.

    Args:
        directory: directory of the run or the sweep.
        is_sweep: whether ``runs`` are the jobs of a sweep.
        runs: the runs in the order of their numbers, including failed and unsupported ones.
        differing: fields of the configuration in which the runs differ, with each run's value.
        is_cut: whether the sweep has unfinished jobs but no process runs it any more.
    """

    directory: Path
    is_sweep: bool
    runs: tuple[Run, ...]
    differing: dict[str, tuple[Any, ...]]
    is_cut: bool = False

    def to_json(self) -> dict[str, Any]:
        """The document of ``runner report --json``."""
        return {
            "directory": str(self.directory),
            "sweep": self.is_sweep,
            "runs": [
                {
                    "name": run.name,
                    "directory": str(run.directory),
                    "differing": {path: values[index] for path, values in self.differing.items()},
                    "record": run.record.to_json(),
                }
                for index, run in enumerate(self.runs)
            ],
        }


def read_report(directory: Path) -> Report:
    """Read the records of a run's or a sweep's directory.

    Raises:
        RequestError: there is no record, or a record cannot be read.
    """
    if not directory.is_dir():
        raise_problems([wrong_directory(directory)])
    if (directory / RECORD_FILE).exists():
        runs: tuple[Run, ...] = (_read(directory),)
        return Report(directory, False, runs, {})
    jobs = {path.parent: _read(path.parent) for path in directory.glob(f"[0-9]*/{RECORD_FILE}")}
    for job, waiting in _waiting(directory).items():
        jobs[job] = _told(jobs[job], waiting.record) if job in jobs else waiting
    if not jobs:
        raise_problems([wrong_directory(directory)])
    runs = tuple(jobs[job] for job in sorted(jobs, key=_number))
    left = (directory / LEDGER_FILE).exists() and any(run.record.status in _NOT_DONE for run in runs)
    cut = left and not is_running(directory)
    return Report(directory, True, runs, differences([run.record.config for run in runs]), cut)


def is_sweep(directory: Path) -> bool:
    """Whether a directory holds the directories of jobs: 0, 1 and so on."""
    return any(directory.glob(f"[0-9]*/{RECORD_FILE}")) and not any(
        not path.parent.name.isdecimal() for path in directory.glob(f"*/{RECORD_FILE}")
    )


def wrong_directory(directory: Path) -> Problem:
    """The problem to report for a directory without records."""
    rule = "must be the directory of a run or of a sweep"
    if directory.is_dir():
        return Problem("DIR", directory, rule, f"it has no {RECORD_FILE}, and no job's directory 0, 1, … with one")
    return Problem("DIR", directory, rule, "it is a file" if directory.exists() else "there is no such directory")


def differences(configs: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Field path to the value of each configuration, for fields that differ; an empty configuration has None."""
    flat = [dict(_leaves("", config)) if config else {} for config in configs]
    paths = dict.fromkeys(path for one in flat for path in one)
    known = [
        one for one in flat if one
    ]  # an unsupported job may have no configuration, which does not count as a difference
    return {
        path: tuple(one.get(path) for one in flat)
        for path in paths
        if path not in _NO_DIFFERENCE and any(one.get(path) != known[0].get(path) for one in known[1:])
    }


def _read(directory: Path) -> Run:
    """Read a record; for a run that is running also its step log, because the record may lag behind."""
    try:
        record = RunRecord.load(directory)
    except (ValueError, TypeError) as error:
        raise_problems([Problem(RECORD_FILE, directory / RECORD_FILE, "must be a run's record", str(error))])
        raise
    steps = read_steps(directory) if record.status == "running" else []
    if len(steps) > record.steps:
        record = record.replace(
            steps=len(steps),
            loss=[one["loss"] for one in steps],
            step_seconds=record.step_seconds | step_seconds([one["seconds"] for one in steps]),
        )
    return Run(directory.name or directory.resolve().name, directory, record)


def _waiting(directory: Path) -> dict[Path, Run]:
    """The jobs of the ledger as runs that wait: those without a record are shown in this state."""
    try:
        ledger = Ledger.load(directory)
    except ValueError as error:
        raise_problems([Problem(LEDGER_FILE, directory / LEDGER_FILE, "must be a sweep's ledger", str(error))])
        raise
    places = {directory / str(job.number): job for job in ledger.jobs}
    told = ledger.told()
    return {
        place: Run(place.name, place, RunRecord(status="waiting", extras={"overrides": told[job.number]}))
        for place, job in places.items()
    }


def _told(run: Run, waiting: RunRecord) -> Run:
    """A run with the overrides that the ledger tells of it, which grow when a sweep is started again with others."""
    return replace(run, record=run.record.replace(extras=run.record.extras | waiting.extras))


def _last_value(pairs: object) -> float | None:
    """The value of the last of some ``[step, value]`` pairs; None for what is none, as in a file of a stranger."""
    match pairs:
        case [*_, [_, int() | float() as value]]:
            return float(value)
    return None


def _number(directory: Path) -> tuple[float, str]:
    name = directory.name
    return (float(name) if name.isdigit() else float("inf"), name)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value
