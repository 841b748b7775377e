"""A rank that stands still is told by name, place and line, and ends the run; a slow one is not disturbed."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from unittest.mock import Mock

import lightning.pytorch as pl
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


@pytest.mark.slow
def test_a_hang_ends_the_run_with_every_ranks_place_and_stacks(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    times = ("launcher.watchdog_seconds=3", "launcher.step_timeout_seconds=8", "trainer.max_steps=60")
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


def _watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 1, **times: float
) -> tuple[Watchdog, list[int], Mock]:
    (tmp_path / "logs").mkdir()
    RunRecord().save(tmp_path)
    ends: list[int] = []
    watchdog = Watchdog(tmp_path, 0, ranks, **times)

    def end(status: int) -> None:
        ends.append(status)
        watchdog.stop()

    monkeypatch.setattr(os, "_exit", end)
    engine = Mock(spec=Engine, actions_begun=0)
    engine.place.return_value = ("in step 1, last at 0F0 (stage 0, layers 0..1)", "a grid")
    strategy = EngineStrategy.__new__(EngineStrategy)
    strategy.engine = engine
    watchdog.on_train_start(Mock(spec=pl.Trainer, strategy=strategy), pl.LightningModule())
    return watchdog, ends, engine


def test_progress_keeps_a_rank_alive_and_standing_still_is_only_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, ends, engine = _watched(tmp_path, monkeypatch, report_seconds=0.3, end_seconds=60.0)
    for _ in range(8):
        time.sleep(0.1)
        engine.actions_begun += 1
    assert not hang_file(tmp_path, 0).exists()
    time.sleep(1.0)
    assert hang_file(tmp_path, 0).read_text().startswith("rank 0 in step 1, last at 0F0 (stage 0, layers 0..1)")
    watchdog.stop()
    assert ends == []
    assert RunRecord.load(tmp_path).status == "running"


def test_a_save_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, ends, _ = _watched(tmp_path, monkeypatch, report_seconds=0.1, end_seconds=0.2)
    assert watchdog._strategy is not None
    watchdog._strategy.patience_seconds = 60.0  # what the strategy's patient() sets
    time.sleep(1.0)
    assert ends == []
    watchdog.stop()


def test_a_rank_that_stays_so_is_ended_with_the_reason_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.training.watchdog._GRACE_SECONDS", 0.1)
    _, ends, _ = _watched(tmp_path, monkeypatch, ranks=2, report_seconds=60.0, end_seconds=0.3)
    end = time.monotonic() + 20
    while not ends and time.monotonic() < end:
        time.sleep(0.05)
    assert ends[0] == 1
    found = RunRecord.load(tmp_path)
    assert found.status == "failed"
    silent = "rank 1 does not say where it is, as one that hangs outside Python"
    assert str(found.reason).startswith(f"no progress for 0 s: {silent}; rank 0 in step 1, last at 0F0")


@pytest.mark.full
def test_out_of_memory_is_answered_with_what_needs_less() -> None:
    config = resolve(["model=gpt", "data.batch_size=16"])
    told = smaller(config, make_plan(config, profile_model(config)))
    assert told.startswith("predicted were ")
    assert "Less is needed with schedule.microbatches=" in told
