"""The width of what the commands print, and lines that keep to it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterable

__all__ = ["PLANNING", "begins", "last_line", "tell", "under_way", "width", "wrapped", "wrapped_lines"]

logger = logging.getLogger(__name__)

_FIRST_SECONDS, _EVERY_SECONDS = 10.0, 30.0

PLANNING = "planning: profiling the model and predicting a step ..."
_EVERY = "RUNNER_PROGRESS_SECONDS"
"""How often a pipe is told that a long command is still at work."""


def width() -> int:
    """The columns of the terminal, or of ``COLUMNS`` if it is set; 80 if neither is known."""
    return shutil.get_terminal_size((80, 24)).columns


def wrapped(line: str, columns: int, indent: str = "") -> str:
    """A line as several that are not longer than so many columns; words that are longer stay whole.

    Args:
        line: the text; if it has lines of its own, it stays as it is.
        columns: the longest line.
        indent: what the lines after the first begin with.
    """
    if "\n" in line:
        return line
    return textwrap.fill(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def wrapped_lines(text: str) -> str:
    """A text whose lines are not longer than the terminal is wide; what goes on below is indented four more columns."""
    columns = width()
    indents = (" " * (len(line) - len(line.lstrip()) + 4) for line in text.splitlines())
    return "\n".join(wrapped(line, columns, indent) for line, indent in zip(text.splitlines(), indents, strict=True))


def begins(what: str) -> None:
    """Say on a terminal, in a line that stays, what this command does before it has anything else to say.

    Of several ranks that torchrun has started, the first one speaks. Nothing is said where standard error is no
    terminal: nobody waits there, and the answer to a wrong request stays one line.
    """
    if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(what, file=sys.stderr, flush=True)


def tell(lines: Iterable[str]) -> None:
    """Log lines that a user should read before the command goes on; of several ranks, the first one speaks."""
    for line in lines if os.environ.get("RANK", "0") == "0" else ():
        logger.warning("%s", line)


def under_way(what: str) -> None:
    """Show on the terminal's last line what a long command does; to a pipe, now and then, that it still does it.

    Args:
        what: the line; empty removes the one before.
    """
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{what[: width() - 1]}")
        sys.stderr.flush()
    _waiting.does(what)


def last_line() -> str:
    """What the command that is being stopped was doing; empty if nothing was under way."""
    return _waiting.what


class _Waiting:
    """Tells a pipe after ten seconds, and then every half minute, or as often as is asked, what is still under way."""

    def __init__(self) -> None:
        self.what = ""
        self._since = 0.0
        self._ended = threading.Event()

    def does(self, what: str) -> None:
        if what and not self.what and not sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
            self._since, self._ended = time.monotonic(), threading.Event()
            threading.Thread(target=self._tell, args=(self._ended,), name="progress", daemon=True).start()
        if not what:
            self._ended.set()
        self.what = what

    def _tell(self, ended: threading.Event) -> None:
        asked = os.environ.get(_EVERY)
        seconds = float(asked or _FIRST_SECONDS)
        while not ended.wait(seconds):
            seconds = float(asked or _EVERY_SECONDS)
            print(f"{self.what} ({time.monotonic() - self._since:.0f} s)", file=sys.stderr, flush=True)


_waiting = _Waiting()
