"""Told to stop, ranks that are out of step save together, are queued again, and end as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_runs import Followed, assert_equal, log, record, steps_on_file, wait_for_step
from slurm_cluster import Cluster

REPLICAS = ("parallelism.data=2", "data.workers=1", "checkpoint.every=10")


def _preempt(cluster: Cluster, job: int, run_dir: Path, number: str) -> None:
    """Signal the job's processes, loader workers too, and see it queued again."""
    restarts = int(cluster.job(job)["Restarts"])
    cluster.command("scancel", f"--signal={number}", str(job))
    cluster.wait_until(
        f"restart {restarts + 1} of job {job}",
        lambda: int(cluster.job(job)["Restarts"]) > restarts,
        found=lambda: log(run_dir),
    )
    assert "Traceback" not in log(run_dir), log(run_dir)


@pytest.mark.costly
def test_a_followed_job_is_queued_again_twice_and_ends_the_same(
    cluster: Cluster, reference: Path, tmp_path: Path
) -> None:
    """Told to stop, and put aside for a job of a higher partition."""
    run_dir = tmp_path / "run"
    followed = Followed(cluster, run_dir, *REPLICAS)
    assert "2 x 1 ranks on n[1-2]; the plan: pipeline 1 x data 2 x tensor 1" in followed.said_of("2 x 1 ranks")
    wait_for_step(run_dir, 3)
    _preempt(cluster, followed.job, run_dir, "USR1")
    followed.said_of(", start 2:")
    wait_for_step(run_dir, steps_on_file(run_dir) + 1)
    _make_room_for_another(cluster, followed.job, run_dir)
    status, said = followed.finish()
    assert "predicted | measured" in said, "it ends as a run of this machine does"
    assert status == 0, said
    assert "stopped by SIGUSR1, saved after step" in said
    assert_equal(run_dir, reference)
    assert record(run_dir)["restarts"] == 2


def _make_room_for_another(cluster: Cluster, job: int, run_dir: Path) -> None:
    """SLURM tells the ranks to stop by SIGTERM, queues the job again itself, and runs the other one first."""
    restarts = int(cluster.job(job)["Restarts"])
    words = ("--partition=high", "--nodes=2", "--ntasks-per-node=4", "--output=/dev/null", "--parsable")
    other = int(cluster.command("sbatch", *words, "--wrap=srun true"))
    cluster.wait_for_state(other, ("COMPLETED",))
    assert int(cluster.job(job)["Restarts"]) == restarts + 1, log(run_dir)
    assert "stopped by SIGTERM, saved after step" in log(run_dir)
