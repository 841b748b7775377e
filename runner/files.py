"""Files that survive a crash of the machine: complete under their name, or as they were before."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["make_directories", "sync_directory", "write_atomically"]


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text``, durably: a crash leaves the old file or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_directories(path: Path) -> None:
    """Make a directory and its missing parents, durably: after a crash their own parents still name them."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        sync_directory(each.parent)


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
