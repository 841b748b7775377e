"""Texts and tables of the commands keep to the terminal's width; only what is copied as a whole may be longer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.cli import screen
from runner.cli.commands import COMMANDS
from runner.cli.help import command_help
from runner.cli.main import main


@pytest.mark.costly
@pytest.mark.parametrize(
    ("line", "columns"),
    [((), 80), (("help", *COMMANDS), 100), (("schedule", "--list"), 80), (("plan", "--rules"), 100), (("doctor",), 80)],
)
def test_lines_are_as_long_as_the_terminal_is_wide(
    line: Sequence[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    main(list(line))
    long = [each for each in capsys.readouterr().out.splitlines() if len(each) > columns]
    assert not [each for each in long if not _is_copied(each)]


def _is_copied(line: str) -> bool:
    """Whether a line is an example, another command, a word that is longer than the line, or a path of the machine."""
    text = line.strip()
    return line.startswith("  runner ") or text.startswith(("pip ", "apt")) or " " not in text or "/" in text


def test_the_width_is_that_of_the_terminal_or_80(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)  # the terminal is not known
    assert screen.width() == 80
    monkeypatch.setenv("COLUMNS", "101")
    assert screen.width() == 101


def test_words_that_are_too_long_stay_whole() -> None:
    assert screen.wrapped("a path/of/many/folders b", 10, "  ").splitlines() == ["a", "  path/of/many/folders", "  b"]
    assert screen.wrapped("{\n  1\n}", 1) == "{\n  1\n}"


def test_every_key_of_the_help_has_a_text() -> None:
    keys = command_help(COMMANDS["train"], Path("nowhere")).partition("Keys, KEY=VALUE")[2].splitlines()[1:]
    entries = [line for line in keys if line[:2] == "  " and line[2] != " "]
    below = dict(zip(keys, [*keys[1:], ""], strict=True))
    bare = [line for line in entries if len(line.split()) == 1 and not below[line].startswith("   ")]
    assert len(entries) > 100
    assert bare == []
