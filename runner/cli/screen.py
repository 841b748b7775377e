"""The width of what the commands print, and lines that keep to it."""

from __future__ import annotations

import shutil
import textwrap

__all__ = ["wrapped", "width"]


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
