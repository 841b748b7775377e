"""Makes Lightning's loggers and profilers by name; a resumed run continues in its earlier logs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from runner.config.schema import LoggerConfig, RunConfig
from runner.errors import Problem, did_you_mean
from runner.record import RunRecord
from runner.targets import import_target, with_environment
from runner.training.csv_log import CsvRows

__all__ = ["PROFILER_FOLDER", "build_loggers", "build_profiler", "logger_problems", "note_identity"]

_IN_EVERY_ROW = {"epoch"}
PROFILER_FOLDER = "profiler"
IDENTITY = "logger_id"
"""Key in the record's extras: the identity that a logger's service gave the run."""

# Arguments of the loggers that write into the run's directory which are the run's to choose.
_OWN_PLACE = dict.fromkeys(("csv", "tensorboard"), ("save_dir", "name", "version", "log_dir", "sub_dir"))

_SERVICES = {"wandb": "lightning.pytorch.loggers:WandbLogger", "mlflow": "lightning.pytorch.loggers:MLFlowLogger"}

# Arguments by which Lightning's loggers for services continue an earlier run.
_IDENTITY_ARGUMENTS = ("version", "run_id", "experiment_key")


def build_loggers(config: RunConfig, run_dir: Path, rank: int, steps: int = 0) -> list[Logger]:
    """The loggers that ``logger=…`` names; only rank 0 has some that write.

    Args:
        steps: number of steps that the run has taken already. Entries of later steps are removed if files hold them.
    """
    asked = config.logger
    others = [LoggerConfig(name, _SERVICES.get(name)) for name in asked.others]
    made = (_build(each, run_dir, rank, steps) for each in (asked, *others))
    return [logger for logger in made if logger is not None]


def _build(asked: LoggerConfig, run_dir: Path, rank: int, steps: int) -> Logger | None:
    """One logger; None where nothing is logged on this rank."""
    kwargs: dict[str, Any] = with_environment(asked.kwargs)
    match asked.name:
        case "none":
            return None
        case "tensorboard":
            if steps:
                kwargs.setdefault("purge_step", steps + 1)
            return _once_and_from_one(TensorBoardLogger(str(run_dir), name="", version="tensorboard", **kwargs))
        case "csv":
            return _csv_logger(run_dir, rank, steps, kwargs)
    if rank != 0:
        return None  # a third-party logger may open a connection as soon as it is made
    make = import_target("logger.target", asked.target or "")
    made = make(**_identity(make, run_dir, kwargs), **kwargs)
    if not isinstance(made, Logger):
        raise TypeError(f"logger.target = {asked.target} is no Lightning logger")
    return _once_and_from_one(made)


def logger_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems with the arguments of the logger, which rank 0 alone makes, when the run has a directory.

    Raises:
        RequestError: ``logger.target`` names nothing that imports.
    """
    kwargs = dict(config.logger.kwargs)
    if config.logger.name in _OWN_PLACE:
        names = {name for make in _made_by(config.logger.name) for name in signature(make).parameters}
        known = sorted(names - {*_OWN_PLACE[config.logger.name], "kwargs"})
        for name in kwargs:
            if name not in known:
                why = f"Its arguments are {', '.join(known)}"
                near = did_you_mean(name, known)
                fix = f"logger.kwargs.{near}={kwargs[name]}" if near is not None else ""
                yield Problem(f"logger.kwargs.{name}", kwargs[name], "is no argument of this logger", why, fix)
    elif config.logger.target is not None:
        make, target = import_target("logger.target", config.logger.target), config.logger.target
        if isinstance(make, type) and not issubclass(make, Logger):
            yield Problem("logger.target", target, "must make a logger of lightning.pytorch")
            return
        try:
            signature(make).bind(**kwargs)
        except TypeError as error:
            yield Problem("logger.kwargs", kwargs, f"must be arguments of {target}", str(error).capitalize())


def _made_by(name: str) -> Sequence[Any]:
    """What gets the arguments of a logger whose place the run chooses."""
    if name == "csv":
        return (CSVLogger,)
    from torch.utils.tensorboard import SummaryWriter

    return (TensorBoardLogger, SummaryWriter)


def _once_and_from_one(logger: Logger, steps: int = 0, of_last_step: Iterable[str] = ()) -> Logger:
    """The logger, with steps counted from 1 as everywhere else, and each figure of a step written once.

    Lightning's loop counts steps from 0, and writes again what was written before a checkpoint.

    Args:
        steps: the steps that the run has taken already.
        of_last_step: the names of the last one's figures that an earlier process has written.
    """
    write = logger.log_metrics
    newest: int | None = steps - 1
    written = {*of_last_step} - _IN_EVERY_ROW

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


def note_identity(loggers: Iterable[Logger], run_dir: Path) -> None:
    """Save the run's identity in a logger's service in the record; on rank 0, after the loggers have started."""
    services = (logger for logger in loggers if not isinstance(logger, TensorBoardLogger | CSVLogger))
    identity = next((logger.version for logger in services if isinstance(logger.version, str)), None)
    if identity is not None:
        record = RunRecord.load(run_dir)
        record.replace(extras=record.extras | {IDENTITY: identity}).save(run_dir)


def _identity(make: Any, run_dir: Path, kwargs: dict[str, Any]) -> dict[str, str]:
    """The argument with which a logger continues the run of this directory's record, unless the user sets one."""
    identity = RunRecord.load(run_dir).extras.get(IDENTITY)
    arguments = signature(make).parameters
    name = next((name for name in _IDENTITY_ARGUMENTS if name in arguments), None)
    if identity is None or name is None or kwargs.keys() & {*_IDENTITY_ARGUMENTS, "id"}:
        return {}
    return {name: identity}


def _csv_logger(run_dir: Path, rank: int, steps: int, kwargs: dict[str, Any]) -> Logger:
    """A CSV logger that keeps the rows of the first ``steps`` steps."""
    kwargs.setdefault("flush_logs_every_n_steps", 1)  # Lightning's 100 would be lost when the process is killed
    made = CSVLogger(str(run_dir), name="", version="csv", **kwargs)
    if rank != 0:
        return made
    made._experiment = rows = CsvRows(made.log_dir, steps)
    return _once_and_from_one(made, steps, rows.of_last_step)


def build_profiler(config: RunConfig, run_dir: Path) -> Profiler | None:
    """The profiler that ``profiler=…`` names; it writes one report per rank into a folder of the run's directory."""
    place = run_dir / PROFILER_FOLDER
    match config.profiler.name:
        case "simple":
            return SimpleProfiler(dirpath=place, filename="profile")
        case "cprofile":
            return AdvancedProfiler(dirpath=place, filename="profile")
        case "pytorch":
            return PyTorchProfiler(dirpath=place, filename="profile")
        case "nvtx":
            return PyTorchProfiler(dirpath=place, filename="profile", emit_nvtx=True)
    return None
