"""A sweep as an array of SLURM's: submitit submits it, the runner's ranks run it, each job is one row."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from cluster_runs import QUIET, RUNNER, SKEWED, STEPS, assert_equal, environment, record, run
from slurm_cluster import PATIENCE_SECONDS, Cluster

ARRAY = ("-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=20", "run_dir=s")
PIPELINE = ("parallelism.pipeline=2", "schedule.microbatches=2")


@pytest.mark.full
def test_an_array_is_preempted_and_ends_the_same(cluster: Cluster, reference: Path, tmp_path: Path) -> None:
    """Two jobs of two ranks over two nodes: one is told to stop, saves, is queued again; the other is cancelled."""
    command = [*RUNNER, "train", *ARRAY, "hydra.launcher.nodes=2", *SKEWED, *PIPELINE, "seed=0,1", *QUIET]
    said = (tmp_path / "said.txt").open("w+")
    started = subprocess.Popen(command, cwd=tmp_path, env=environment(cluster), stdout=said, stderr=subprocess.STDOUT)
    try:
        array = _array(tmp_path / "said.txt")
        for number, stop in ((0, ["--signal=USR2"]), (1, [])):
            _wait_for_step(tmp_path / "s" / str(number), 3)
            cluster.command("scancel", *stop, f"{array}_{number}")
        assert started.wait(timeout=2 * PATIENCE_SECONDS) == 1
    finally:
        started.kill()
    text = (tmp_path / "said.txt").read_text()
    assert_equal(tmp_path / "s" / "0", reference)
    assert record(tmp_path / "s" / "0")["restarts"] == 1, text
    assert record(tmp_path / "s" / "1")["status"] == "preempted", text
    done = record(tmp_path / "s" / "1")["steps"]
    again = run(cluster, tmp_path, *command)
    assert f"continuing after step {done} of" in again.stderr
    assert "1 of 2 jobs are done already" in again.stderr
    assert [record(tmp_path / "s" / number)["status"] for number in ("0", "1")] == ["ok", "ok"]
    assert [record(tmp_path / "s" / number)["steps"] for number in ("0", "1")] == [STEPS, STEPS]


def test_an_array_that_cannot_be_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    words = (*RUNNER, "train", *ARRAY, *SKEWED, "schedule.microbatches=2", "parallelism.pipeline=1,2")
    refused = run(cluster, tmp_path, *words, status=2).stderr
    assert "parallelism = [1, 2]: must ask for one number of ranks in all jobs." in refused
    unknown = run(cluster, tmp_path, *words[:-1], "hydra.launcher.timeout=3", status=2).stderr
    assert "hydra.launcher = " in unknown
    assert "timeout" in unknown
    assert "Traceback" not in refused + unknown
    assert not (tmp_path / "s").exists()


def _array(said: Path) -> str:
    end = time.monotonic() + PATIENCE_SECONDS
    while "submitted as SLURM job " not in (text := said.read_text()):
        assert time.monotonic() < end, text
        time.sleep(0.1)
    return text.split("submitted as SLURM job ")[1].split(":")[0]


def _wait_for_step(run_dir: Path, step: int) -> None:
    lines, end = run_dir / "steps.jsonl", time.monotonic() + PATIENCE_SECONDS
    while not lines.exists() or len(lines.read_text().splitlines()) < step:
        assert time.monotonic() < end, run_dir
        time.sleep(0.02)
