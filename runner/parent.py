"""Lets a process end with its parent, also where the parent is killed and can end nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time

__all__ = ["end_with"]

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let this process be killed when its parent ends, or end it at once if the parent has ended already.

    On Linux the kernel does it, when the parent's thread that made this process has ended. Elsewhere a thread of this
    process looks twice a second.

    Args:
        parent: the number of the process that made this one.
    """
    if hasattr(signal, "SIGKILL") and os.uname().sysname == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the kernel was told
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
