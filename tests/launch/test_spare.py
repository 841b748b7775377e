"""A run that may restart keeps a process that has imported, and its next ranks are forked from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launch_helpers import OVERRIDES
from processes import left_behind

from runner.config.compose.resolve import resolve
from runner.launch.start import train
from runner.record import RunRecord

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.costly
def test_the_ranks_of_a_restart_are_forked_from_the_spare(tmp_path: Path) -> None:
    ranks = 2
    config = resolve([*OVERRIDES, f"parallelism.pipeline={ranks}", "run_dir=run", "launcher.max_restarts=2"])
    assert train(config, command="a test", entry="restarting_entries:fail_first") == 0
    first, second = (
        [Path(f"run/forked_{start}_{rank}").read_text() for rank in range(ranks)] for start in ("first", "second")
    )
    assert first == ["in time"] * ranks
    assert second == ["ahead"] * ranks
    assert RunRecord.load(Path("run")).status == "ok"
    assert left_behind(tmp_path) == []  # nor the spare for a third start


@pytest.mark.costly
def test_a_spare_that_nobody_needed_ends_with_the_run(tmp_path: Path) -> None:
    config = resolve([*OVERRIDES, "run_dir=run", "launcher.max_restarts=1"])
    assert train(config, command="a test", entry="restarting_entries:wait_for_the_spare") == 0
    assert Path("run/spare").exists()
    assert left_behind(tmp_path) == []
