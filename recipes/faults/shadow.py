"""What of a run's files would be left if the machine lost its power: a shadow file system.

A file's content is on the disk as it was when the file was last synced, and a directory names what it named when it was
last synced. That is the least that POSIX promises, and what file systems keep at worst. The shadow notes both at every
fsync, and makes of them the directory that a machine would find after power has come back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Shadow"]


class Shadow:
    """Notes in a folder outside the run what has been synced, for all processes of the run.

    Args:
        folder: where it keeps its notes; on the file system of the run, because it holds files by hard links: the
            number of a file that was deleted must not be given to another one.
        root: the run's directory. It is on the disk itself.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._contents, self._held, self._names = (folder / name for name in ("contents", "held", "names"))
        self._root = root
        for each in (self._contents, self._held, self._names):
            each.mkdir(parents=True, exist_ok=True)

    def synced(self, descriptor: int) -> None:
        """A file or a directory is on the disk."""
        status, path = os.fstat(descriptor), os.readlink(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(status.st_mode):
            with self._alone():  # an older list of names must not replace a newer one of another process
                self._note_names(Path(path))
            return
        self._hold(path, status.st_ino)
        with open(f"/proc/self/fd/{descriptor}", "rb") as file:
            self._put(self._contents / str(status.st_ino), file.read())

    def moved(self, source: Path, target: Path) -> None:
        """A directory has another name; what was known of it goes with it."""
        notes = self._notes(source)
        if notes.exists():
            os.replace(notes, self._notes(target))

    def removed(self, directory: Path) -> None:
        """A directory and all below it was deleted."""
        self._notes(directory).unlink(missing_ok=True)

    def lose_power(self, chance: random.Random | None) -> None:
        """Replace the run's directory by what is on the disk. No process of the run may live.

        Args:
            chance: keeps some of what was not synced, a name or the beginning of a content; None keeps nothing of it.
        """
        after = self._root.with_name(f"{self._root.name}.after")
        self._rebuild(self._root, after, chance)
        shutil.rmtree(self._root)
        after.rename(self._root)
        for folder in (self._contents, self._held, self._names):
            shutil.rmtree(folder)
            folder.mkdir()
        self._all_synced()

    def _all_synced(self) -> None:
        """What is there after the start of the machine is on the disk."""
        for directory, _, files in os.walk(self._root):
            for each in (*(Path(directory, name) for name in files), Path(directory)):
                handle = os.open(each, os.O_RDONLY)
                self.synced(handle)
                os.close(handle)

    def _rebuild(self, directory: Path, after: Path, chance: random.Random | None) -> None:
        after.mkdir()
        notes = self._notes(directory)
        known: dict[str, int] = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
        now = _names_in(directory) if directory.is_dir() else {}
        if chance is not None:
            known |= {name: number for name, number in sorted(now.items()) if chance.random() < 0.5}
        for name, number in sorted(known.items()):
            if number < 0:
                self._rebuild(directory / name, after / name, chance)
            else:
                (after / name).write_bytes(self._content(number, directory / name, chance))

    def _content(self, number: int, path: Path, chance: random.Random | None) -> bytes:
        synced = self._contents / str(number)
        if synced.exists():
            return synced.read_bytes()
        if chance is None or not path.is_file():
            return b""
        whole = path.read_bytes()
        return whole[: chance.randint(0, len(whole))]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock that the death of this process frees."""
        handle = os.open(self._names, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _note_names(self, directory: Path) -> None:
        names = _names_in(directory)
        for name, number in names.items():
            if number >= 0:
                self._hold(str(directory / name), number)
        self._put(self._notes(directory), json.dumps(names).encode())

    def _notes(self, directory: Path) -> Path:
        relative = os.path.relpath(directory, self._root)
        return self._names / f"in {relative.replace('/', '|')}"

    def _hold(self, path: str, number: int) -> None:
        """Keep a file from being freed, so that its number stays its own."""
        try:
            os.link(path, self._held / str(number))
        except (FileExistsError, FileNotFoundError):  # it is held, or was deleted meanwhile
            return

    def _put(self, path: Path, content: bytes) -> None:
        """Write a note so that the death of this process leaves the earlier or the new one."""
        own = path.with_name(f".{os.getpid()}-{threading.get_ident()}-{path.name}")
        own.write_bytes(content)
        os.rename(own, path)


def _names_in(directory: Path) -> dict[str, int]:
    """The names in a directory: with the number of a file, or -1 for a directory."""
    found = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            found[entry.name] = -1 if entry.is_dir(follow_symlinks=False) else entry.inode()
    return found
