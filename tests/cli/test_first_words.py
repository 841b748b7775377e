"""A command that is silent for seconds says first, to who waits at a terminal, what it does."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from runner.cli.main import main
from runner.cli.screen import PLANNING
from runner.launch import start


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_run_is_announced_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[str] = []

    def train(*_: Any, **__: Any) -> int:
        before.append(terminal.getvalue())
        return 0

    terminal = Screen()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(start, "train", train)
    assert main(["train", "model=mlp"]) == 0
    assert before == [f"{PLANNING}\n"]


def test_a_log_and_the_ranks_after_the_first_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "train", lambda *_, **__: 0)
    for stream, rank in ((io.StringIO(), "0"), (Screen(), "1")):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("RANK", rank)
        assert main(["train", "model=mlp"]) == 0
        assert stream.getvalue() == ""


def test_a_plan_is_announced_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Screen()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert main(["plan", "model=mlp", "metrics.x=nowhere_at_all:f"]) == 2
    announced, _, refused = terminal.getvalue().partition("\r\x1b[2K" + PLANNING)
    assert announced == ""
    assert refused.startswith("\r\x1b[2Kmetrics.x = nowhere_at_all:f: ")
