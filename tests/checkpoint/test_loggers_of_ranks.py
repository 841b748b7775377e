"""Only rank 0 makes a logger that writes: another one would touch the same files, or open a connection of its own."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
from resume_runs import train

TWO = ("parallelism.pipeline=2", "partition=uniform", "checkpoint.every=2")


@pytest.mark.slow
def test_a_logger_is_made_by_rank_0_alone(tmp_path: Path) -> None:
    logger = ("logger=custom", "logger.target=telling_loggers:Telling", f"+logger.kwargs.folder={tmp_path}")
    done = train(tmp_path / "run", *TWO, *logger, "trainer.max_steps=2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "made_by").read_text().split() == ["0"]


@pytest.mark.slow
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
