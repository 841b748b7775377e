"""Whether all machines of a run see the same run directory."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

__all__ = ["leave_mark", "sees_mark"]


def leave_mark(run_dir: Path) -> str:
    """Make an empty file in the directory and return its name, which no other run has."""
    name = f".seen-{secrets.token_hex(8)}"
    (run_dir / name).touch()
    return name


def sees_mark(run_dir: Path, name: str, patience_seconds: float) -> bool:
    """Whether the file of this name is in the directory, or comes there in time."""
    end = time.monotonic() + patience_seconds
    while True:
        try:
            if name in os.listdir(run_dir):  # unlike a look at the file, this asks a server anew
                return True
        except OSError:
            pass
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
