"""Told to stop, ranks that are out of step save together, are queued again, and end as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_runs import SKEWED, assert_equal, log, record, submit, train, wait_for_step
from slurm_cluster import Cluster

REPLICAS = (*SKEWED, "parallelism.data=2", "schedule.microbatches=2", "data.workers=1")


def _queued_again(cluster: Cluster, job: int, times: int, run_dir: Path) -> None:
    cluster.wait_until(f"restart {times} of job {job}", lambda: int(cluster.job(job)["Restarts"]) >= times)
    assert "Traceback" not in log(run_dir), log(run_dir)


@pytest.mark.slow
def test_a_job_that_is_preempted_and_loses_a_node_ends_the_same(cluster: Cluster, tmp_path: Path) -> None:
    steps = "trainer.max_steps=80"
    run_dir = tmp_path / "run"
    job = submit(cluster, tmp_path, "run", *REPLICAS, steps, "checkpoint.every=10")
    wait_for_step(run_dir, 5)
    cluster.command("scancel", "--signal=USR1", str(job))
    _queued_again(cluster, job, 1, run_dir)
    wait_for_step(run_dir, record(run_dir)["steps"] + 15)
    cluster.fail_node("n2")
    cluster.start_node("n2")
    assert cluster.wait_for_state(job, ["COMPLETED", "FAILED"])["JobState"] == "COMPLETED", log(run_dir)
    train(cluster, tmp_path, *REPLICAS, steps, "run_dir=local")
    assert_equal(run_dir, tmp_path / "local")
    assert record(run_dir)["restarts"] == 2
    assert "stopped by SIGUSR1, saved after step" in log(run_dir)
