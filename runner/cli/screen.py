"""The width of what the commands print, and lines that keep to it."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable

__all__ = ["PLANNING", "begins", "tell", "under_way", "width", "wrapped", "wrapped_lines"]

logger = logging.getLogger(__name__)

PLANNING = "planning: profiling the model and predicting a step ..."


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
    """Show on the terminal's last line what a long command does; nothing where standard error is no terminal.

    Args:
        what: the line; empty removes the one before.
    """
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{what}")
        sys.stderr.flush()
