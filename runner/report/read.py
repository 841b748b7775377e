"""The records under a directory: one run, or the jobs of a sweep, also while they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import Problem, raise_problems
from runner.record import RECORD_FILE, RunRecord, read_steps, step_seconds
from runner.report.ledger import LEDGER_FILE, Ledger, is_running

__all__ = ["Report", "Run", "differences", "read_report", "wrong_directory"]

# Where a run lies tells nothing of what it is.
_NO_DIFFERENCE = ("run_dir",)
_NOT_DONE = ("waiting", "running", "preempted", "interrupted")


@dataclass(frozen=True, slots=True)
class Run:
    """One record. ``name`` is the job's number in a sweep, else the directory's name."""

    name: str
    directory: Path
    record: RunRecord

    @property
    def loss(self) -> float | None:
        """Of the last optimizer step."""
        return self.record.loss[-1] if self.record.loss else None

    @property
    def val_loss(self) -> float | None:
        """Of the last validation."""
        return self.record.val_loss[-1][1] if self.record.val_loss else None

    @property
    def median_seconds(self) -> float | None:
        """Of an optimizer step."""
        value: float | None = self.record.step_seconds.get("median")
        return value

    @property
    def peak_memory_bytes(self) -> float | None:
        """Measured, of the rank that needs most."""
        measured = self.record.peak_memory_bytes.get("measured") or []
        return max((value for value in measured if value is not None), default=None)


@dataclass(frozen=True, slots=True)
class Report:
    """What was found.

    Args:
        directory: of the run or the sweep.
        is_sweep: whether ``runs`` are the jobs of a sweep.
        runs: in the order of their numbers; failed and unsupported ones too.
        differing: fields of the configuration in which the runs differ, with each run's value.
        is_cut: whether jobs of a sweep are left that no process runs any more.
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
        RequestError: there is no record in it, or one cannot be read.
    """
    if (directory / RECORD_FILE).exists():
        runs: tuple[Run, ...] = (_read(directory),)
        return Report(directory, False, runs, {})
    jobs = {path.parent: _read(path.parent) for path in directory.glob(f"[0-9]*/{RECORD_FILE}")}
    jobs |= {job: waiting for job, waiting in _waiting(directory).items() if job not in jobs}
    if not jobs:
        raise_problems([wrong_directory(directory)])
    runs = tuple(jobs[job] for job in sorted(jobs, key=_number))
    left = (directory / LEDGER_FILE).exists() and any(run.record.status in _NOT_DONE for run in runs)
    cut = left and not is_running(directory)
    return Report(directory, True, runs, differences([run.record.config for run in runs]), cut)


def wrong_directory(directory: Path) -> Problem:
    """What to say of a directory without records."""
    rule = "must be the directory of a run or of a sweep"
    why = f"it has no {RECORD_FILE}" if directory.is_dir() else "there is no such directory"
    return Problem("DIR", directory, rule, f"{why}, and no job's directory 0, 1, … with one")


def differences(configs: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Field path to each configuration's value, where they differ; a configuration that is empty has None."""
    flat = [dict(_leaves("", config)) if config else {} for config in configs]
    paths = dict.fromkeys(path for one in flat for path in one)
    known = [one for one in flat if one]  # an unsupported job may have none: that makes no field differ
    return {
        path: tuple(one.get(path) for one in flat)
        for path in paths
        if path not in _NO_DIFFERENCE and any(one.get(path) != known[0].get(path) for one in known[1:])
    }


def _read(directory: Path) -> Run:
    """A running run's record may lag behind its steps: both are read."""
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
    """The jobs of the sweep's ledger as they are before they have a record."""
    try:
        ledger = Ledger.load(directory)
    except ValueError as error:
        raise_problems([Problem(LEDGER_FILE, directory / LEDGER_FILE, "must be a sweep's ledger", str(error))])
        raise
    places = {directory / str(job.number): job for job in ledger.jobs}
    return {
        place: Run(place.name, place, RunRecord(status="waiting", extras={"overrides": list(job.overrides)}))
        for place, job in places.items()
    }


def _number(directory: Path) -> tuple[float, str]:
    name = directory.name
    return (float(name) if name.isdigit() else float("inf"), name)


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value
