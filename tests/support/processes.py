"""Processes that a test looks for."""

from __future__ import annotations

import os
import time
from pathlib import Path


def working_in(directory: Path) -> list[int]:
    """The other living processes whose working directory is this one or below it: a command's, its ranks', theirs.

    A rank that was forked has the command line and the environment of what it was forked from; it works where its
    command does.
    """
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if _works_in(process, directory)]


def left_behind(directory: Path, patience: float = 3.0) -> list[int]:
    """What works there still; the kernel may take a moment to end what has been killed."""
    end = time.monotonic() + patience
    while (alive := working_in(directory)) and time.monotonic() < end:
        time.sleep(0.05)
    return alive


def is_alive(process: Path) -> bool:
    """Of a process's directory in ``/proc``."""
    return ") Z " not in (process / "stat").read_text()


def _works_in(process: Path, directory: Path) -> bool:
    try:
        own = process.name == str(os.getpid())
        return not own and (process / "cwd").readlink().is_relative_to(directory.resolve()) and is_alive(process)
    except OSError:  # it ended meanwhile, or is another user's
        return False
