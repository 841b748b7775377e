"""The README taken apart: its commands, its tables, its code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
OPTIONS = (ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\b[^\n]*\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every ``runner …`` line of the shell blocks as words, comments left out."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == ["runner"]]


def installs() -> list[str]:
    """The lines of the first shell block, comments left out."""
    return [line.split("#")[0].strip() for line in blocks("sh")[0].splitlines()]


def table(heading: str) -> list[list[str]]:
    """Rows of the table under ``## heading``, of the README or its page of options, as cells, the header left out."""
    whole = next(text for text in (TEXT, OPTIONS) if f"## {heading}\n" in text)
    section = whole.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def quoted(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)
