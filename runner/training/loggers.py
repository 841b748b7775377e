"""Lightning's loggers and profilers by name; a run that goes on in its directory goes on in its logs."""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import Profiler, PyTorchProfiler, SimpleProfiler

from runner.config.schema import RunConfig
from runner.record import RunRecord
from runner.targets import import_target

__all__ = ["build_logger", "build_profiler", "note_identity"]

IDENTITY = "logger_id"
"""The record's key of what a logger's service calls the run."""

# Under which argument Lightning's loggers of services take up a run again.
_IDENTITY_ARGUMENTS = ("version", "run_id", "experiment_key")


def build_logger(config: RunConfig, run_dir: Path, rank: int, steps: int = 0) -> Logger | bool:
    """The logger of ``logger=…``; only rank 0 has one that writes.

    Args:
        steps: that the run has taken already. What was logged after them is taken back, where files hold it.
    """
    kwargs: dict[str, Any] = dict(config.logger.kwargs)
    match config.logger.name:
        case "none":
            return False
        case "tensorboard":
            if steps:
                kwargs.setdefault("purge_step", steps)
            return TensorBoardLogger(str(run_dir), name="", version="tensorboard", **kwargs)
        case "csv":
            return _csv_logger(run_dir, rank, steps, kwargs)
    if rank != 0:
        return False  # a stranger's logger may open a connection as soon as it is made
    make = import_target("logger.target", config.logger.target or "")
    made = make(**_identity(make, run_dir, kwargs), **kwargs)
    if not isinstance(made, Logger):
        raise TypeError(f"logger.target = {config.logger.target} is no Lightning logger")
    return made


def note_identity(logger: Logger | None, run_dir: Path) -> None:
    """Put into the record what the logger's service calls the run; on rank 0, once the logger has begun."""
    identity = logger.version if logger is not None else None
    if isinstance(identity, str) and not isinstance(logger, TensorBoardLogger | CSVLogger):
        record = RunRecord.load(run_dir)
        record.replace(extras=record.extras | {IDENTITY: identity}).save(run_dir)


def _identity(make: Any, run_dir: Path, kwargs: dict[str, Any]) -> dict[str, str]:
    """The argument that lets a logger go on with the run that this directory's record names, if the user gives none."""
    identity = RunRecord.load(run_dir).extras.get(IDENTITY)
    arguments = inspect.signature(make).parameters
    name = next((name for name in _IDENTITY_ARGUMENTS if name in arguments), None)
    if identity is None or name is None or kwargs.keys() & {*_IDENTITY_ARGUMENTS, "id"}:
        return {}
    return {name: identity}


def _csv_logger(run_dir: Path, rank: int, steps: int, kwargs: dict[str, Any]) -> CSVLogger:
    """Lightning's deletes the file that is there: its lines of the first ``steps`` steps are written again."""
    file = run_dir / "csv" / "metrics.csv"
    earlier = []
    if rank == 0 and steps and file.exists():
        with file.open(encoding="utf-8", newline="") as lines:
            earlier = [row for row in csv.DictReader(lines) if int(row["step"]) < steps]
    made = CSVLogger(str(run_dir), name="", version="csv", **kwargs)
    for row in earlier:
        step = int(row.pop("step"))
        made.log_metrics({name: value for name, value in row.items() if value}, step)  # type: ignore[misc]  # as written
    if earlier:
        made.save()
    return made


def build_profiler(config: RunConfig, run_dir: Path) -> Profiler | None:
    """The profiler of ``profiler=…``; its report lies in the run's directory, one file per rank."""
    match config.profiler.name:
        case "simple":
            return SimpleProfiler(dirpath=run_dir, filename="profile")
        case "pytorch":
            return PyTorchProfiler(dirpath=run_dir, filename="profile")
    return None
