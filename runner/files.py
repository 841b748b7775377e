"""Files that survive a crash of the machine: complete under their name, or as they were before."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

__all__ = ["make_directories", "new_file_beside", "remove_unfinished", "sync_directory", "write_atomically"]

_UNFINISHED = re.compile(r"\.\d+-\d+-(.+)")
"""What :func:`new_file_beside` makes."""


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of ``path`` by ``text``, durably: a crash leaves the old file or the new one."""
    handle, temporary = new_file_beside(path)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def new_file_beside(path: Path, prefix: str = ".") -> tuple[int, Path]:
    """Make an empty file in the folder of ``path``, with the rights that the user's umask leaves; tempfile's are 600.

    Args:
        prefix: the beginning of its name.

    Returns:
        its descriptor, open for writing, and its path.
    """
    attempt = 0
    while True:
        temporary = path.with_name(f"{prefix}{os.getpid()}-{attempt}-{path.name}")
        try:
            return os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temporary
        except FileExistsError:  # of a writer that was killed, or of another machine's
            attempt += 1


def remove_unfinished(directory: Path, names: Collection[str]) -> None:
    """Delete what killed writers of the files ``names`` left in a directory; call it only while nobody writes them."""
    for path in directory.iterdir():
        found = _UNFINISHED.fullmatch(path.name)
        if found is not None and found[1] in names:
            path.unlink(missing_ok=True)


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
