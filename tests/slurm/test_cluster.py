"""The fixture is a real cluster: two nodes by name, jobs that are requeued, nodes that fail."""

from __future__ import annotations

from slurm_cluster import Cluster


def test_a_step_runs_on_both_nodes(cluster: Cluster) -> None:
    said = cluster.command("srun", "--nodes=2", "--ntasks-per-node=2", "hostname")
    assert sorted(said.split()) == ["n1", "n1", "n2", "n2"]
