"""The standard streams of a command: one that is closed is the null device, and one that nobody reads becomes it.

A command does its work and ends with its own status whether or not its output is read to the end (``| head``).
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

__all__ = ["guard_streams"]

_NAMES = ("stdin", "stdout", "stderr")  # by file descriptor


def guard_streams() -> None:
    """Open the streams that this process was started without, and let the others outlive their readers.

    Call it first: a file or socket that is opened before would get the number of a closed stream, and be printed into.
    """
    for number, name in enumerate(_NAMES):
        if not _is_open(number):
            _to_nowhere(number)
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for name, stream in _own_outputs():
        setattr(sys, name, _outliving(stream))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _to_nowhere(number: int) -> None:
    """Let a file descriptor be the null device; children inherit it."""
    opened = os.open(os.devnull, os.O_RDWR)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def _own_outputs() -> Iterator[tuple[str, TextIO]]:
    """The output streams that are Python's own, and not what somebody has put in their place."""
    for number, name in enumerate(_NAMES[1:], 1):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
            yield name, stream


def _outliving(stream: TextIO) -> TextIO:
    stream.flush()
    unbuffered = io.BufferedWriter(_Outliving(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(
        unbuffered,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


class _Outliving(io.FileIO):
    """A file whose reader may end: from then on nothing is written, and that is no error.

    Any other error, such as that of a full disk, is raised once, and not again when the process ends.
    """

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            _to_nowhere(self.fileno())
            if not isinstance(error, BrokenPipeError):
                raise
            return memoryview(data).nbytes
