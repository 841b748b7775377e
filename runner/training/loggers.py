"""Lightning's loggers and profilers by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.profilers import Profiler, PyTorchProfiler, SimpleProfiler

from runner.config.schema import RunConfig
from runner.model.targets import import_target

__all__ = ["build_logger", "build_profiler"]


def build_logger(config: RunConfig, run_dir: Path, rank: int) -> Logger | bool:
    """The logger of ``logger=…``; only rank 0 has one that writes."""
    kwargs: dict[str, Any] = dict(config.logger.kwargs)
    match config.logger.name:
        case "none":
            return False
        case "tensorboard":
            return TensorBoardLogger(str(run_dir), name="", version="tensorboard", **kwargs)
        case "csv":
            return CSVLogger(str(run_dir), name="", version="csv", **kwargs)
    if rank != 0:
        return False  # a stranger's logger may open a connection as soon as it is made
    made = import_target("logger.target", config.logger.target or "")(**kwargs)
    if not isinstance(made, Logger):
        raise TypeError(f"logger.target = {config.logger.target} is no Lightning logger")
    return made


def build_profiler(config: RunConfig, run_dir: Path) -> Profiler | None:
    """The profiler of ``profiler=…``; its report lies in the run's directory, one file per rank."""
    match config.profiler.name:
        case "simple":
            return SimpleProfiler(dirpath=run_dir, filename="profile")
        case "pytorch":
            return PyTorchProfiler(dirpath=run_dir, filename="profile")
    return None
