"""A rank that stands still is told by name, place and line, and ends the run; a slow one is not disturbed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from user_project import make_directory, record, train

from runner.config.compose.resolve import resolve
from runner.engine.engine import Engine
from runner.launch.run.memory_advice import smaller
from runner.plan.make import make_plan
from runner.profiling.model import profile_model
from runner.record import RunRecord, hang_file
from runner.strategy.pipeline import EngineStrategy
from runner.training.watchdog import Watchdog

TWO = ("parallelism.pipeline=2", "schedule.microbatches=2", "partition=uniform")


@pytest.mark.costly
def test_a_hang_ends_the_run_with_every_ranks_place_and_stacks(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    times = ("launcher.watchdog_seconds=10", "launcher.step_timeout_seconds=20", "trainer.max_steps=60")
    done = train(directory, *TWO, *times, "model.target=mine:waiting", "model.kwargs.phase=step")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    reason = record(directory / "run")["reason"]
    assert reason.count("no progress for") == 1
    assert re.search(
        r"no progress for \d+ s: rank 1 in step .*; rank 0 in step .*, waiting for other ranks; see ", reason
    )
    assert done.stderr.strip().endswith("rank_1.hang.txt")
    assert "(stage 1, layers 2..3), at mine.py:" in reason
    assert "in wait" in reason
    for rank in (0, 1):
        said = hang_file(directory / "run", rank).read_text()
        assert "^ here: " in said
        assert "thread MainThread" in said
    assert "time.sleep(600)" in said


class Clock:
    """Stands for the clock and the waiting of a watchdog: each poll takes a tenth of a second and does what is next."""

    def __init__(self, *polls: Callable[[], object] | None) -> None:
        self.now, self.polls = 0.0, [*polls]

    def tick(self) -> float:
        self.now += 0.1
        return self.now

    def wait(self, seconds: float) -> bool:
        if not self.polls:
            return True
        do = self.polls.pop(0)
        if do is not None:
            do()
        return False


def _watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *polls: Callable[[], object] | None, ranks: int = 1,
    report: float, end: float, patience: float = 0.0, begun: Mock | None = None,
) -> list[int]:  # fmt: skip
    """The statuses with which a watchdog ended its process within these polls."""
    (tmp_path / "logs").mkdir(exist_ok=True)
    RunRecord().save(tmp_path)
    clock, ends = Clock(*polls), list[int]()
    monkeypatch.setattr("runner.training.watchdog.PollClock", lambda: clock)

    def leave(status: int) -> None:
        ends.append(status)
        clock.polls.clear()

    monkeypatch.setattr(os, "_exit", leave)
    watchdog = Watchdog(tmp_path, 0, ranks, report, end)
    strategy = EngineStrategy.__new__(EngineStrategy)
    strategy.engine = begun or _engine()
    strategy.patience_seconds = patience
    watchdog._strategy, watchdog._done = strategy, cast(Any, clock)
    watchdog._watch()
    return ends


def _engine() -> Mock:
    engine = Mock(spec=Engine, actions_begun=0)
    engine.place.return_value = ("in step 1, last at 0F0 (stage 0, layers 0..1)", "a grid")
    return engine


def test_progress_keeps_a_rank_alive_and_standing_still_is_only_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine()

    def begin() -> None:
        engine.actions_begun += 1

    assert _watched(tmp_path, monkeypatch, *[None, None, begin] * 5, begun=engine, report=0.35, end=60.0) == []
    assert not hang_file(tmp_path, 0).exists()
    assert _watched(tmp_path, monkeypatch, *[None] * 5, report=0.35, end=60.0) == []
    assert hang_file(tmp_path, 0).read_text().startswith("rank 0 in step 1, last at 0F0 (stage 0, layers 0..1)")
    assert RunRecord.load(tmp_path).status == "running"


def test_a_save_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _watched(tmp_path, monkeypatch, *[None] * 20, patience=60.0, report=0.1, end=0.2) == []
    assert _watched(tmp_path, monkeypatch, *[None] * 20, report=0.1, end=0.2) == [1]


def test_a_rank_that_stays_so_is_ended_with_the_reason_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _watched(tmp_path, monkeypatch, *[None] * 5, ranks=2, report=60.0, end=0.3) == [1]
    found = RunRecord.load(tmp_path)
    assert found.status == "failed"
    silent = "rank 1 does not say where it is, as one that hangs outside Python"
    assert str(found.reason).startswith(f"no progress for 0 s: {silent}; rank 0 in step 1, last at 0F0")


@pytest.mark.costly
def test_out_of_memory_is_answered_with_what_needs_less() -> None:
    config = resolve(["model=gpt", "data.batch_size=16"])
    told = smaller(config, make_plan(config, profile_model(config)))
    assert told.startswith("predicted were ")
    assert "Less is needed with schedule.microbatches=" in told
