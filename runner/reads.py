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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Heard", "deaf", "digest_of_file", "heard", "hearing", "installed", "is_users_file"]

_READERS = {"os", "collections", "_collections_abc", "posixpath", "omegaconf"}
"""Packages through which variables of the environment are read for others."""
_COPY = 0.9  # a line that reads this share of the environment copies it, whatever is in it
_SOURCES_BY = ("pathlib.py", "runpy.py")  # through which a user's code reads sources that are no modules
_SMALL = 1 << 16  # bytes; what is kept of smaller files is known when they are opened, of others later, if they stay
_WHOLE_FILES = 16 << 20  # bytes; of larger files, size and time count
_ENVIRON: Any = type(os.environ)

_State = tuple[int, int]
"""A file's size and the time at which it was changed, in nanoseconds."""


class Heard:
    """What has been read, in this process or in the one of which it is a fork."""

    def __init__(self) -> None:
        self._files: dict[str, list[_State | str]] = {}  # digests, or states of large ones, when opened
        self._written: set[str] = set()
        self._variables: dict[tuple[Any, int], dict[str, list[str]]] = {}  # by line: names, with digests of values
        self._depth, self._deaf, self._hears_all, self._is_hooked = 0, 0, False, False
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

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """See :func:`deaf`."""
        with self._lock:  # ranks may be threads
            self._deaf += 1
        try:
            yield
        finally:
            with self._lock:
                self._deaf -= 1

    @property
    def hears(self) -> bool:
        """Whether what is read now is asked for."""
        return not self._deaf

    def files(self) -> dict[str, list[str]]:
        """What was opened, by name: a file's contents, one after another, as digests, or states that have gone.

        A large file that was written, too, is left out: it keeps what follows from what else is read.
        """
        found = {}
        for name, whens in sorted(self._files.items()):
            now = _state(name)
            found[name] = [
                _told(name, when, now) for when in whens if isinstance(when, str) or name not in self._written
            ]
        return found

    def variables(self) -> dict[str, list[list[str]]]:
        """The variables of the environment, by name, with digests of the values that each line of code has read."""
        found = dict[str, list[list[str]]]()
        for of_line in self._variables.values():
            for name, values in of_line.items() if len(of_line) < max(_COPY * len(os.environ), 3) else ():
                found.setdefault(name, []).append(values)
        return {name: sorted(values) for name, values in sorted(found.items())}

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._depth or event != "open" or getattr(self._reading, "now", False):
            return
        if not isinstance(args[0], str | bytes | os.PathLike):
            return
        self._reading.now = True
        try:
            with suppress(Exception):
                name = os.path.abspath(os.fsdecode(args[0]))
                if _makes(*args[1:3]):
                    self._written.add(name)
                elif self._counts(name, sys._getframe(1)):
                    state = _state(name)
                    small = state is not None and state[0] <= _SMALL
                    _append(self._files.setdefault(name, []), digest_of_file(Path(name)) if small else state or "")
        finally:
            self._reading.now = False

    def _counts(self, name: str, frame: FrameType) -> bool:
        if name.endswith(".py"):
            return _reads_source(frame)
        return _is_data(name) and (self._hears_all or _by_user(frame))

    def _hear_variable(self, read: Callable[..., str]) -> Callable[..., str]:
        def hear(environ: Any, name: Any) -> str:
            frame = sys._getframe(1)
            while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _READERS:
                frame = frame.f_back
            try:
                value = read(environ, name)
            except KeyError:
                self._note_variable(frame, name, "")
                raise
            self._note_variable(frame, name, value)
            return value

        return hear

    def _note_variable(self, frame: FrameType, name: Any, value: str) -> None:
        if is_users_file(frame.f_code.co_filename):
            of_line = self._variables.setdefault((frame.f_code, frame.f_lineno), {})
            _append(of_line.setdefault(str(name), []), hashlib.sha256(os.fsencode(value)).hexdigest())


heard = Heard()
"""What this process has heard."""


def hearing(*, by_all: bool = False) -> AbstractContextManager[None]:
    """Within the context, note what is read.

    Args:
        by_all: note the files that any code reads; otherwise those that a user's code does, by itself or through a
            library, but not what a library reads when it is imported.
    """
    return heard.hearing(by_all=by_all) if heard.hears else nullcontext()


def deaf() -> AbstractContextManager[None]:
    """Within the context nothing is noted, as in a rank, which plans nothing."""
    return heard.deaf()


def _makes(mode: Any, flags: Any) -> bool:
    """Whether a file is opened to be written; one that is opened to be changed in place counts as read."""
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax")
    return bool(isinstance(flags, int) and flags & os.O_WRONLY)


def _append(values: list[Any], value: Any) -> None:
    """Append what is another value than the last one."""
    if values[-1:] != [value]:
        values.append(value)


def _told(name: str, when: _State | str, now: _State | None) -> str:
    """The digest of a file as it was opened, or its state then if it is another one now."""
    if isinstance(when, str):
        return when
    return digest_of_file(Path(name)) if when == now else f"{when} once"


def _state(name: str) -> _State | None:
    with suppress(OSError):
        file = os.stat(name)
        return file.st_size, file.st_mtime_ns
    return None


def _reads_source(frame: FrameType | None) -> bool:
    """Whether a user's code reads a source itself, which is then no module's, or not alone."""
    while frame is not None and frame.f_code.co_filename.endswith(_SOURCES_BY):
        frame = frame.f_back
    return frame is not None and is_users_file(frame.f_code.co_filename)


def _by_user(frame: FrameType | None) -> bool:
    """Whether a user's code is being run, with nothing inside it but calls of installed libraries."""
    while frame is not None:
        if is_users_file(frame.f_code.co_filename):
            return True
        file = frame.f_code.co_filename
        if not _is_installed(file) or (frame.f_code.co_name == "<module>" and not file.startswith("<")):
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
    is_others = name.startswith(tuple(each + os.sep for each in others))
    return not is_others and not name.endswith((".py", ".pyc")) and os.path.isfile(name)


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
