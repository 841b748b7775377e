"""Forks of a rank, such as those of a data loader's workers, wait until no other thread of the rank runs."""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path

__all__ = ["forks_wait_for_threads"]

_MOST_SECONDS = 0.25  # a thread that computes for long holds no lock that a forked process needs
_THREADS = Path("/proc/self/task")
_SECONDS_UNSEEN = 0.01  # where the system does not show what threads do


@functools.cache
def forks_wait_for_threads() -> None:
    """From now on, let this process fork only while its other threads sleep.

    A forked process has the locks of its parent, held or free, and not the threads that held them. When a thread of
    Gloo drops the tensors of a finished message, it holds, for a moment, a lock of the interpreter that up to CPython
    3.11.7 a forked process takes before anything else (https://github.com/python/cpython/issues/112275): it then waits
    for ever, and a run with ``data.workers`` hangs at the first batch of an epoch or of a validation.
    """
    os.register_at_fork(before=_wait)


def _wait() -> None:
    if not _THREADS.is_dir():
        time.sleep(_SECONDS_UNSEEN)
        return
    give_up = time.monotonic() + _MOST_SECONDS
    while _another_runs() and time.monotonic() < give_up:
        time.sleep(0.0005)


def _another_runs() -> bool:
    own = threading.get_native_id()
    return any(_runs(thread) for thread in _THREADS.iterdir() if int(thread.name) != own)


def _runs(thread: Path) -> bool:
    """Whether a thread is on a core, or waits for one."""
    try:
        state = (thread / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return False
    return state.rpartition(")")[2].split()[0] == "R"
