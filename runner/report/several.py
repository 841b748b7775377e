"""Reads runs of several directories side by side, and of folders that hold runs somewhere below."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from runner.errors import raise_problems
from runner.record import RECORD_FILE
from runner.report.ledger import LEDGER_FILE
from runner.report.read import Report, differences, is_sweep, read_report, wrong_directory

__all__ = ["read_reports"]

_DEEPEST = 4  # folders below one that is named: outputs/<name>/<time>, and a folder of the user's above
_NO_RUNS = {"checkpoints", "logs", "report", "tensorboard", "csv", "profiler"}


def read_reports(directories: Sequence[Path]) -> Report:
    """The runs of several directories, or below one, in one report; of one run or sweep as :func:`read_report` does.

    Args:
        directories: runs, sweeps, or folders that hold such.

    Raises:
        RequestError: a directory holds no record; the error names all such.
    """
    found = [place for directory in directories for place in _places(directory)]
    empty = [directory for directory in directories if not any(_places(directory))]
    raise_problems([wrong_directory(directory) for directory in empty])
    places = list(dict.fromkeys(found))
    if len(places) == 1:
        return read_report(places[0])
    top = Path(os.path.commonpath([place.resolve() for place in places]))
    top = top if len(directories) > 1 else directories[0]
    found_runs = [run for place in places for run in read_report(place).runs]
    runs = tuple(replace(run, name=str(number)) for number, run in enumerate(found_runs, 1))
    return Report(top, False, runs, differences([run.record.config for run in runs]))


def _places(directory: Path, depth: int = 0) -> Iterator[Path]:
    """The runs and sweeps in a folder, by their names; the folder itself if it is one."""
    if not directory.is_dir():
        return
    if (directory / RECORD_FILE).exists() or (directory / LEDGER_FILE).exists() or is_sweep(directory):
        yield directory
    elif depth < _DEEPEST:
        for inner in sorted(directory.iterdir()):
            if inner.is_dir() and not inner.is_symlink() and inner.name not in _NO_RUNS:
                yield from _places(inner, depth + 1)
