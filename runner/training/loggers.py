"""Makes Lightning's loggers and profilers by name; a resumed run continues in its earlier logs."""

from __future__ import annotations

import csv
import inspect
import io
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from runner.config.schema import RunConfig
from runner.record import RunRecord
from runner.targets import import_target, with_environment

__all__ = ["build_logger", "build_profiler", "note_identity"]

_IN_EVERY_ROW = {"epoch"}
IDENTITY = "logger_id"
"""Key in the record's extras: the identity that a logger's service gave the run."""

# Arguments by which Lightning's loggers for services continue an earlier run.
_IDENTITY_ARGUMENTS = ("version", "run_id", "experiment_key")


def build_logger(config: RunConfig, run_dir: Path, rank: int, steps: int = 0) -> Logger | bool:
    """The logger that ``logger=…`` names; only rank 0 has one that writes.

    Args:
        steps: number of steps that the run has taken already. Entries of later steps are removed if files hold them.
    """
    kwargs: dict[str, Any] = with_environment(config.logger.kwargs)
    match config.logger.name:
        case "none":
            return False
        case "tensorboard":
            if steps:
                kwargs.setdefault("purge_step", steps + 1)
            return _once_and_from_one(TensorBoardLogger(str(run_dir), name="", version="tensorboard", **kwargs))
        case "csv":
            return _once_and_from_one(_csv_logger(run_dir, rank, steps, kwargs))
    if rank != 0:
        return False  # a third-party logger may open a connection as soon as it is made
    make = import_target("logger.target", config.logger.target or "")
    made = make(**_identity(make, run_dir, kwargs), **kwargs)
    if not isinstance(made, Logger):
        raise TypeError(f"logger.target = {config.logger.target} is no Lightning logger")
    return _once_and_from_one(made)


def _once_and_from_one(logger: Logger) -> Logger:
    """The logger, with steps counted from 1 as everywhere else, and each figure of a step written once.

    Lightning's loop counts steps from 0, and writes again what was written before a checkpoint.
    """
    write = logger.log_metrics
    newest: int | None = None
    written: set[str] = set()

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        nonlocal newest
        if step is None:
            return write(metrics, None)
        if step != newest:
            newest = step
            written.clear()
        new = {name: value for name, value in metrics.items() if name not in written}
        written.update(new.keys() - _IN_EVERY_ROW)
        if new.keys() - _IN_EVERY_ROW:
            write(new, step + 1)
        return None

    logger.log_metrics = log_metrics  # type: ignore[method-assign]  # the instance alone
    return logger


def note_identity(logger: Logger | None, run_dir: Path) -> None:
    """Save the run's identity in the logger's service in the record; on rank 0, after the logger has started."""
    identity = logger.version if logger is not None else None
    if isinstance(identity, str) and not isinstance(logger, TensorBoardLogger | CSVLogger):
        record = RunRecord.load(run_dir)
        record.replace(extras=record.extras | {IDENTITY: identity}).save(run_dir)


def _identity(make: Any, run_dir: Path, kwargs: dict[str, Any]) -> dict[str, str]:
    """The argument with which a logger continues the run of this directory's record, unless the user sets one."""
    identity = RunRecord.load(run_dir).extras.get(IDENTITY)
    arguments = inspect.signature(make).parameters
    name = next((name for name in _IDENTITY_ARGUMENTS if name in arguments), None)
    if identity is None or name is None or kwargs.keys() & {*_IDENTITY_ARGUMENTS, "id"}:
        return {}
    return {name: identity}


def _csv_logger(run_dir: Path, rank: int, steps: int, kwargs: dict[str, Any]) -> CSVLogger:
    """A CSV logger that keeps the lines of the first ``steps`` steps.

    Lightning's own deletes an existing file. It is moved aside until the lines have been written again, so that none is
    lost if this process ends in between: the next one then finds it there.
    """
    file = run_dir / "csv" / "metrics.csv"
    aside = file.with_suffix(".earlier")
    earlier: list[dict[str, str]] = []
    if rank == 0 and steps:
        if file.exists() and not aside.exists():
            file.replace(aside)
        earlier = _rows_before(aside, steps)
    kwargs.setdefault("flush_logs_every_n_steps", 1)  # Lightning's 100 would be lost when the process is killed
    made = CSVLogger(str(run_dir), name="", version="csv", **kwargs)
    for row in earlier:
        step = int(row.pop("step"))
        made.log_metrics({name: value for name, value in row.items() if value}, step)  # type: ignore[misc]  # as written
    if earlier:
        made.save()
    if rank == 0:
        aside.unlink(missing_ok=True)
    return made


def _rows_before(file: Path, steps: int) -> list[dict[str, str]]:
    """The rows of the first ``steps`` steps; none if there is no file.

    A last row that a killed writer did not complete is left out.
    """
    if not file.exists():
        return []
    text = file.read_bytes().decode("utf-8", errors="replace")
    complete = text[: text.rfind("\n") + 1].replace("\0", "")  # a machine that crashes may leave zeros at the end
    rows = [row for row in csv.DictReader(io.StringIO(complete, newline="")) if str(row.get("step")).isdecimal()]
    return [row for row in rows if None not in row.values() and int(row["step"]) <= steps]


def build_profiler(config: RunConfig, run_dir: Path) -> Profiler | None:
    """The profiler that ``profiler=…`` names; it writes one report per rank into the run's directory."""
    match config.profiler.name:
        case "simple":
            return SimpleProfiler(dirpath=run_dir, filename="profile")
        case "cprofile":
            return AdvancedProfiler(dirpath=run_dir, filename="profile")
        case "pytorch":
            return PyTorchProfiler(dirpath=run_dir, filename="profile")
        case "nvtx":
            return PyTorchProfiler(dirpath=run_dir, filename="profile", emit_nvtx=True)
    return None
