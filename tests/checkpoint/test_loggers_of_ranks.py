"""Only rank 0 makes a logger that writes: another one would touch the same files, or open a connection of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import warm
from resume_runs import command
from resume_zoo import OVERRIDES

TWO = ("parallelism.pipeline=2", "partition=uniform", "checkpoint.every=2")


def train(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``runner train`` with the zoo's overrides, but with a logger."""
    usual = [word for word in OVERRIDES if word != "logger=none"]
    line, environment = command("train", *usual, f"run_dir={run_dir}", *overrides)
    return warm.run(line, env=environment, cwd=run_dir.parent, timeout=1500)


@pytest.mark.costly
def test_a_logger_is_made_by_rank_0_alone(tmp_path: Path) -> None:
    logger = ("logger=custom", "logger.target=telling_loggers:Telling", f"+logger.kwargs.folder={tmp_path}")
    done = train(tmp_path / "run", *TWO, *logger, "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made_by").read_text().split() == ["0"]
