"""A long command says to a pipe that it is still at work, and where it was when it is stopped."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from runner.cli import main as command
from runner.cli import screen
from runner.progress import doing, heard, now


class Pipe(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "best so far" in self.getvalue():
            self.told.set()
        return written


def test_a_pipe_is_told_what_is_under_way_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setenv("RUNNER_PROGRESS_SECONDS", "0.01")
    with heard(screen.under_way):
        with doing("planning ..."):
            now("12 orders planned, the best so far takes 3 s")
            assert pipe.told.wait(600)
        assert screen.last_line() == ""
    line = next(line for line in pipe.getvalue().splitlines() if "best so far" in line)
    assert line.startswith("12 orders planned, the best so far takes 3 s (")


def test_what_goes_on_around_a_part_is_said_again() -> None:
    lines: list[str] = []
    now("nobody works")
    with heard(lines.append), doing("a search"), doing("one of its plans"):
        now("the next one")
    assert lines == ["a search", "one of its plans", "the next one", "a search", ""]


def test_a_command_that_is_stopped_says_how_far_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(arguments: object) -> int:
        with doing("planning ..."):
            now("7 orders planned, the best so far takes 3 s a step")
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "_runner", lambda name: stopped)
    assert command.main(["plan"]) == 130
    assert capsys.readouterr().err == "stopped by SIGINT at: 7 orders planned, the best so far takes 3 s a step\n"
    screen.under_way("")
