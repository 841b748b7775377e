"""Chooses the directory of a run, once, before any process of the run exists."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from runner.config.schema import RunConfig
from runner.errors import Problem, raise_problems, typed_word
from runner.record import RECORD_FILE, RunRecord

__all__ = [
    "check_run_directory",
    "create_run_directory",
    "job_directory",
    "last_run",
    "run_directory_problems",
    "taken_directory",
]

OUTPUTS = Path("outputs")


def run_directory_problems(name: str, run_dir: str | None, *, continues: bool = False) -> list[Problem]:
    """Problems with the directory that a run or a sweep asks for; nothing is written.

    Args:
        name: part of the default directory, ``outputs/<name>/<timestamp>``.
        run_dir: the directory that was asked for, or None for the default.
        continues: whether the run may continue in a directory that already holds a run.
    """
    if run_dir is None and (not name or name in (".", "..") or "/" in name or "\0" in name):
        return [Problem("name", name, "must be one file name", "it names the run's directory", "name=run")]
    wanted = Path(run_dir) if run_dir is not None else OUTPUTS / name
    if (wanted.exists() or wanted.is_symlink()) and not wanted.is_dir():
        return [Problem("run_dir", wanted, "must be a directory", "it is a file", "run_dir=outputs/other")]
    if run_dir is not None and not continues and (taken := taken_directory(wanted)) is not None:
        return [taken]
    existing = wanted
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        why = f"{existing} is a file"
        return [Problem("run_dir", wanted, "must lie in a directory", why, "run_dir=outputs/other")]
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"this user may not write in {existing.resolve()}"
        return [Problem("run_dir", wanted, "must be writable", why, "run_dir=/tmp/run")]
    return []


def check_run_directory(config: RunConfig) -> list[Problem]:
    """Return :func:`run_directory_problems` for a request."""
    return run_directory_problems(config.name, config.run_dir, continues=config.resume == "auto")


def create_run_directory(name: str, run_dir: str | None) -> Path:
    """Make the directory and return its absolute path; a default directory is new and belongs to this caller alone.

    Raises:
        RequestError: the file system refuses.
    """
    try:
        if run_dir is not None:
            path = Path(run_dir).absolute()
            path.mkdir(parents=True, exist_ok=True)
            return path
        return _new_directory((OUTPUTS / name).absolute(), time.strftime("%Y-%m-%d_%H-%M-%S"))
    except OSError as error:
        asked = run_dir if run_dir is not None else str(OUTPUTS / name)
        raise_problems([Problem("run_dir", asked, "must be writable", str(error), "run_dir=/tmp/run")])
        raise


def job_directory(sweep_dir: Path, number: int) -> Path:
    """Return the directory of a sweep's job, ``<sweep_dir>/<number>``, and make it if it does not exist."""
    path = sweep_dir / str(number)
    (path / "logs").mkdir(parents=True, exist_ok=True)
    return path


def _new_directory(parent: Path, name: str) -> Path:
    """Make a directory that did not exist; two runs of the same second get different names."""
    parent.mkdir(parents=True, exist_ok=True)
    attempt = 0
    while True:
        path = parent / (name if attempt == 0 else f"{name}_{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return path


def last_run(name: str) -> Path | None:
    """The newest of the default directories of the runs called ``name``; None if there is none."""
    found = [record.parent for record in (OUTPUTS / name).glob(f"*/{RECORD_FILE}")]
    return max(found, key=lambda directory: directory.stat().st_mtime, default=None)


def taken_directory(directory: Path) -> Problem | None:
    """The refusal of a directory that holds a run or a sweep; a run that is not complete can continue in it."""
    if not _holds_a_run(directory):
        return None
    rule, why = "must be new or empty", "It holds the record of an earlier run, which would be overwritten"
    with contextlib.suppress(FileNotFoundError, ValueError):
        record = RunRecord.load(directory)
        if record.status != "ok":
            return Problem("run_dir", directory, rule, f"{why}; that run is not complete", "resume=auto")
    return Problem("run_dir", directory, rule, why, typed_word("run_dir", f"{directory}_again"))


def _holds_a_run(directory: Path) -> bool:
    if not directory.is_dir():
        return False
    return (directory / RECORD_FILE).exists() or any(directory.glob(f"[0-9]*/{RECORD_FILE}"))
