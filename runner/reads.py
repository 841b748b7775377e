"""What a user's code reads of files and of the environment while a request is planned; needs no torch.

A module may read its settings when it is imported, and a function may keep what it has read. A process that is forked
later then uses what nobody reads again, so that reading is heard from the first import on. A profile is known by what
was heard, see :mod:`runner.profiling.form`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Heard", "digest_of_file", "heard", "hearing", "installed", "is_users_file"]

_READERS = {"os", "collections.abc", "_collections_abc"}  # modules through which variables are read
_WHOLE_FILES = 16 << 20  # bytes; of larger files, size and time count
_ENVIRON: Any = type(os.environ)


class Heard:
    """What has been read, in this process or in the one of which it is a fork.

    Attributes:
        files: names, with the digests of what each had when it was opened.
        variables: names of variables of the environment.
    """

    def __init__(self) -> None:
        self.files: dict[str, list[str]] = {}
        self.variables: set[str] = set()
        self._depth, self._hears_all, self._is_hooked = 0, False, False
        self._states: dict[str, tuple[int, int]] = {}  # of each file, when it was last opened
        self._lock = threading.RLock()
        self._reading = threading.local()

    @contextmanager
    def hearing(self, *, by_all: bool) -> Iterator[None]:
        """See :func:`hearing`."""
        with self._lock:
            if not self._is_hooked:
                sys.addaudithook(self._hear)  # can never be taken off, and is silent outside of such contexts
                self._is_hooked = True
            before, self._hears_all = self._hears_all, self._hears_all or by_all
            self._depth += 1
            if self._depth == 1:
                self._read = _ENVIRON.__getitem__
                _ENVIRON.__getitem__ = self._hear_variable(self._read)
        try:
            yield
        finally:
            with self._lock:
                self._hears_all = before
                self._depth -= 1
                if not self._depth:
                    _ENVIRON.__getitem__ = self._read

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._depth or event != "open" or getattr(self._reading, "now", False) or not _reads(*args[:3]):
            return
        self._reading.now = True
        try:
            with suppress(Exception):
                name = os.path.abspath(os.fsdecode(args[0]))
                if _is_data(name) and (self._hears_all or _by_user(sys._getframe(1))):
                    self._note(name)
        finally:
            self._reading.now = False

    def _note(self, name: str) -> None:
        file = os.stat(name)
        if self._states.get(name) != (file.st_size, file.st_mtime_ns):
            self._states[name] = file.st_size, file.st_mtime_ns
            digest = digest_of_file(Path(name))
            if digest not in self.files.setdefault(name, []):
                self.files[name].append(digest)

    def _hear_variable(self, read: Callable[..., str]) -> Callable[..., str]:
        def hear(environ: Any, name: Any) -> str:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__") in _READERS:
                frame = frame.f_back
            if is_users_file(frame.f_code.co_filename):
                self.variables.add(str(name))
            return read(environ, name)

        return hear


heard = Heard()
"""What this process has heard."""


def hearing(*, by_all: bool = False) -> AbstractContextManager[None]:
    """Within the context, note what is read.

    Args:
        by_all: note the files that any code reads; otherwise those that a user's code does, by itself or through a
            library, but not what a library reads when it is imported.
    """
    return heard.hearing(by_all=by_all)


def _reads(file: Any, mode: Any, flags: Any) -> bool:
    if not isinstance(file, str | bytes | os.PathLike):
        return False
    if isinstance(mode, str):
        return not any(letter in mode for letter in "wax+")
    return not (isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _by_user(frame: FrameType | None) -> bool:
    """Whether a user's code is being run, with nothing inside it but calls of installed libraries."""
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return True
        if not _is_installed(frame.f_code.co_filename) or frame.f_code.co_name == "<module>":
            return False
        frame = frame.f_back
    return False


@cache
def is_users_file(filename: str) -> bool:
    """Whether code of this file is neither installed nor the runner's own."""
    return not _is_installed(filename) and Path(__file__).parent not in Path(filename).parents


@cache
def _is_installed(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith(("<", sysconfig.get_path("stdlib")))


def _is_data(name: str) -> bool:
    """Whether a file is a user's, and no source, which count as such."""
    others = (*installed(), sys.base_prefix, sys.prefix, "/proc", "/sys", "/dev", str(Path(__file__).parent))
    return not name.startswith(others) and not name.endswith((".py", ".pyc")) and os.path.isfile(name)


@cache
def installed() -> tuple[str, ...]:
    """The folders of the standard library and of installed packages."""
    return tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def digest_of_file(file: Path) -> str:
    """Digest of what a file has; of a large one, its size and the time at which it was changed.

    Raises:
        OSError: it cannot be read.
    """
    state = file.stat()
    if state.st_size > _WHOLE_FILES:
        return f"{state.st_size} bytes of {state.st_mtime_ns}"
    return hashlib.sha256(file.read_bytes()).hexdigest()
