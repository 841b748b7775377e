"""A run that breaks starts again from its newest checkpoint, as often as it may, and ends as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_runs import assert_same_run, record_of, train

pytestmark = pytest.mark.slow
TWO = ("parallelism.pipeline=2", "model.target=breaking:model", "checkpoint.every=3")


@pytest.mark.full
def test_two_ranks_that_were_killed(tmp_path: Path) -> None:
    """The second time before a first new checkpoint is due; then once more than it may."""
    at = tmp_path / "at"
    overrides = (*TWO, f"+model.kwargs.at={at}")
    done = train(tmp_path / "whole", *overrides)
    assert done.returncode == 0, done.stderr
    at.write_text("40 10")
    done = train(tmp_path / "broken", *overrides, "launcher.max_restarts=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("died: SIGKILL") == 2
    assert at.read_text() == ""
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    assert record_of(tmp_path / "broken")["restarts"] == 2

    at.write_text("10 10")
    done = train(tmp_path / "twice", *overrides, "launcher.max_restarts=1")
    assert done.returncode == 1
    record = record_of(tmp_path / "twice")
    assert (record["status"], record["restarts"]) == ("failed", 1)
    assert "died: SIGKILL" in record["reason"]
