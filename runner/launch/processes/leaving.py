"""Ends a process whose work is done."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

__all__ = ["leave", "wait_for_threads"]


def leave(status: int) -> NoReturn:
    """End the process without the interpreter's own teardown.

    In that teardown, threads of torch's communication sometimes abort although all work is done (see
    :func:`runner.engine.transport.processes.destroy_process_groups`), and after a failure they may wait for peers that
    have ended. It takes half a second of each command, too. Functions that others registered for the end of the process
    are still called.
    """
    atexit._run_exitfuncs()
    if "multiprocessing" in sys.modules:
        import multiprocessing

        for child in multiprocessing.active_children():
            child.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone, or somebody has closed it
            stream.flush()
    os._exit(status)


def wait_for_threads() -> None:
    """Wait, as the interpreter does at its end, for threads that must not be cut off."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
