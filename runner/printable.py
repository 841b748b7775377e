"""Text of strangers, made safe to show: a record or a checkpoint may hold what moves a cursor or hides a word.

A terminal obeys control characters, and some characters of Unicode show text in another order than it has. Here they
become visible escapes, as Python writes them in a literal.
"""

from __future__ import annotations

import logging
import unicodedata
from html import escape

from typing_extensions import override

__all__ = ["PrintableLines", "markdown_text", "printable", "printable_line"]

_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode's categories of control and format characters, lone surrogates, separators of lines and of paragraphs."""
_OF_LINES = "\n\t"
_MARKS = "\\`[]|"
"""Characters that begin code, links, images and cells in Markdown. The others at most change how a text looks."""


def printable(text: str, *, keep: str = _OF_LINES) -> str:
    """``text`` in which each character that a terminal obeys is an escape such as ``\\x1b``.

    Args:
        keep: characters that stay as they are.
    """
    return "".join(
        _shown(each) if each not in keep and unicodedata.category(each) in _OBEYED else each for each in text
    )


def printable_line(text: str) -> str:
    """The same in one line: its ends of lines and its tabs are blanks."""
    return printable(text.replace("\n", " ").replace("\t", " "), keep="")


def markdown_text(text: str) -> str:
    """``text`` as one line of Markdown that shows it as it is: no HTML, link, image, code or table begins in it."""
    line = escape(printable_line(text), quote=False)
    return "".join(f"\\{each}" if each in _MARKS else each for each in line)


class PrintableLines(logging.Formatter):
    """Formats the messages of a log for a terminal."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _shown(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
