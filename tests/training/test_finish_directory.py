"""The directory that a run is given is where everything of it stands, whatever its configuration says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from runner.config.compose.resolve import resolve
from runner.launch.run.prepare import prepare, write_request
from runner.training.run import run_rank

BASE = (
    "model=mlp", "trainer.max_steps=3", "data.batch_size=4", "device=cpu", "logger=none", "trainer.progress=false",
)  # fmt: skip


@pytest.mark.costly
def test_the_steps_are_read_from_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``run_dir=null`` and another working directory the record once had no steps and no losses."""
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    config = replace(resolve(BASE), run_dir=None)
    write_request(config, prepare(config), run_dir, command="")
    monkeypatch.chdir(elsewhere)
    run_rank(config, run_dir)
    record = json.loads((run_dir / "record.json").read_text(encoding="utf-8"))
    assert record["status"] == "ok"
    assert record["steps"] == 3
    assert len(record["loss"]) == 3
