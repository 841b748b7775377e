"""Only rank 0 makes a logger that writes: another one would touch the same files, or open a connection of its own."""

from __future__ import annotations

import csv
import shutil
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
    return warm.run(line, env=environment, cwd=run_dir.parent, timeout=280)


@pytest.mark.slow
def test_a_logger_is_made_by_rank_0_alone(tmp_path: Path) -> None:
    logger = ("logger=custom", "logger.target=telling_loggers:Telling", f"+logger.kwargs.folder={tmp_path}")
    done = train(tmp_path / "run", *TWO, *logger, "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made_by").read_text().split() == ["0"]


@pytest.mark.full
def test_a_resumed_pipeline_keeps_the_lines_of_the_csv_log(tmp_path: Path) -> None:
    """Rank 1 took away the lines that rank 0 was about to write again, if it came first."""
    run = tmp_path / "run"
    done = train(run, *TWO, "logger=csv", "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    shutil.copytree(run, tmp_path / "again")
    for again in (run, tmp_path / "again"):
        done = train(again, *TWO, "logger=csv", "trainer.max_steps=4", "resume=auto")
        assert done.returncode == 0, done.stderr
        with (again / "csv" / "metrics.csv").open(newline="") as file:
            assert [row["step"] for row in csv.DictReader(file) if row["loss"]] == ["1", "2", "3", "4"]
