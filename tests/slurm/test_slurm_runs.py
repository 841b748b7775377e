"""Runs over two nodes: equal to runs on this machine, and understandable where they cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_runs import QUIET, RUNNER, SKEWED, assert_equal, run, train
from slurm_cluster import Cluster

PLAIN = ("model=mlp", "data.batch_size=16", "schedule.microbatches=2", "trainer.max_steps=3")
SLURM = ("launcher=slurm", "launcher.nodes=2")
SRUN = ("srun", "--nodes=2")


def test_two_ranks_on_each_node_equal_one_process(cluster: Cluster, reference: Path, tmp_path: Path) -> None:
    """Started by srun inside of an allocation; one rank on each node: test_preemption.py."""
    layout = ("parallelism.pipeline=4", "schedule.microbatches=2", "name=four")
    words = (*SRUN, "--ntasks-per-node=2", *RUNNER, "train", *SKEWED, *layout, *QUIET)
    said = run(cluster, tmp_path, *words).stderr
    assert "2 x 2 ranks on n[1-2]; the plan: pipeline 4 x data 1 x tensor 1" in said
    (made,) = (tmp_path / "outputs" / "four").iterdir()
    assert made.name.startswith("job_")
    assert_equal(made, reference)


def test_a_layout_that_is_not_the_plans_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    words = (*SRUN, "--ntasks-per-node=1", *RUNNER, "train", *PLAIN)
    refused = run(cluster, tmp_path, *words, "parallelism.pipeline=4", status=2)
    assert "2 x 1 ranks on n[1-2]; the plan: pipeline 4 x data 1 x tensor 1" in refused.stderr
    assert "parallelism = 4 x 1 x 1: the product of the degrees, 4, must be the number of ranks, 2" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.costly
def test_what_sbatch_refuses_is_told(cluster: Cluster, tmp_path: Path) -> None:
    refused = train(
        cluster, tmp_path, *PLAIN, *SLURM, "launcher.partition=none", "parallelism.pipeline=2", "run_dir=r", status=1
    )
    assert "sbatch did not take" in refused.stderr
    assert "Invalid partition name specified" in refused.stderr
    assert list(tmp_path.iterdir()) == [], "what is refused leaves nothing"
