"""What a long command is doing, told to who waits for it.

A search says how far it is where it is; a command that has a terminal or a pipe to write to listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["doing", "heard", "now"]

_listeners: list[Callable[[str], None]] = []
_work: list[str] = []


@contextmanager
def heard(listener: Callable[[str], None]) -> Iterator[None]:
    """Call ``listener`` with each line while the block runs; with an empty one when nothing is under way any more."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what the block does; when it ends, what goes on around it is said again.

    If a user stops it, the last line stays, so that the command can say how far it was.
    """
    _work.append(what)
    _tell()
    is_stopped = False
    try:
        yield
    except KeyboardInterrupt:
        is_stopped = True
        raise
    finally:
        _work.pop()
        if not is_stopped:
            _tell()


def now(what: str) -> None:
    """Say how far the work of the innermost :func:`doing` is; nothing where there is none."""
    if _work:
        _work[-1] = what
        _tell()


def _tell() -> None:
    line = _work[-1] if _work else ""
    for listener in _listeners:
        listener(line)
