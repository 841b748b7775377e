"""Copies of a weight are compared before they are saved: all ranks would load the one that is in the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_runs import record_of, train


@pytest.mark.slow
def test_a_copy_that_has_changed_is_not_saved(tmp_path: Path) -> None:
    flips = ("callbacks.flips.target=flipping:Flips", "+callbacks.flips.kwargs={rank: 0, step: 4}")
    settings = ("parallelism.data=2", "schedule.microbatches=1", "checkpoint.every=2", "trainer.max_steps=8")
    done = train(tmp_path / "run", *settings, *flips, "schedule.twin_check_every=100", "trainer.val_every=null")
    assert done.returncode == 1, done.stderr
    assert "differ" in str(record_of(tmp_path / "run")["reason"])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2.ckpt"]
