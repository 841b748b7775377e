"""Where ``checkpoint.every`` is not given, a failure costs about ten minutes, whatever a step takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.checkpoint.file import checkpoint_files
from runner.config.compose.resolve import resolve
from runner.config.schema import CheckpointConfig
from runner.launch.run.prepare import prepare, write_request
from runner.training import checkpoints
from runner.training.checkpoints import steps_between
from runner.training.run import run_rank


@pytest.mark.parametrize(("seconds", "steps"), [(0.05, 12_000), (2.0, 300), (420.0, 1), (10_000.0, 1)])
def test_ten_minutes_of_predicted_steps_lie_between_two(seconds: float, steps: int) -> None:
    assert steps_between(CheckpointConfig(), seconds) == steps
    assert steps_between(CheckpointConfig(every=7), seconds) == 7


def test_an_unknown_step_is_no_division_by_zero() -> None:
    assert steps_between(CheckpointConfig(), 0.0) > 1_000_000


def test_a_run_saves_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ten minutes were no time at all, after every step; otherwise the last step alone."""
    for name, seconds, saved in (("often", 0.0, [1, 2, 3]), ("once", 600.0, [3])):
        monkeypatch.setattr(checkpoints, "_SECONDS_BETWEEN", seconds)
        directory = tmp_path / name
        words = ["model=mlp", "data.batch_size=4", "trainer.max_steps=3", "checkpoint.keep=9", "logger=none"]
        config = resolve([*words, "device=cpu", "trainer.progress=false", f"run_dir={directory}"])
        plan = prepare(config)
        directory.mkdir()
        write_request(config, plan, directory, command="")
        run_rank(config, directory)
        assert sorted(checkpoint_files(directory / "checkpoints")) == saved
