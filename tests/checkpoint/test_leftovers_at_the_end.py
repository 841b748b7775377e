"""A resumed run that has no step left removes what killed writers left, too."""

from __future__ import annotations

from pathlib import Path

import pytest
from resume_runs import run_here


def test_unfinished_files_go_where_no_step_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    run_here(monkeypatch, run, "trainer.max_steps=2", "checkpoint.every=1")
    passed_over = run / "checkpoints" / "passed-over-step-1.ckpt"
    passed_over.mkdir()
    for folder in (run / "checkpoints", passed_over):
        (folder / ".unfinished-1-0-rank-0-of-1.safetensors").touch()
    (passed_over / "rank-0-of-2.safetensors").touch()
    run_here(monkeypatch, run, "trainer.max_steps=2", "checkpoint.every=1", "resume=auto")
    assert list((run / "checkpoints").rglob(".*")) == []
    assert list(passed_over.iterdir()) == [passed_over / "rank-0-of-2.safetensors"]
