"""Runs over two nodes: equal to runs on this machine, and understandable where they cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster_runs import RUNNER, assert_equal, log, record, run, train
from slurm_cluster import Cluster

PLAIN = ("model=mlp", "data.batch_size=16", "schedule.microbatches=2", "trainer.max_steps=3")
SLURM = ("launcher=slurm", "launcher.nodes=2")
SRUN = ("srun", "--nodes=2")


@pytest.mark.slow
def test_two_nodes_equal_this_machine(cluster: Cluster, tmp_path: Path) -> None:
    """One rank on each and followed to the end; two on each, started inside of an allocation."""
    train(cluster, tmp_path, *PLAIN, "run_dir=local", "parallelism.pipeline=2")
    said = train(cluster, tmp_path, *PLAIN, *SLURM, "launcher.wait=true", "run_dir=two", "parallelism.pipeline=2")
    assert "2 x 1 ranks on n[1-2]; the plan: pipeline 2 x data 1 x tensor 1" in said.stderr
    assert_equal(tmp_path / "two", tmp_path / "local")

    four = (
        *PLAIN,
        "parallelism.pipeline=2",
        "parallelism.data=2",
        "name=four",
        "logger=none",
        "trainer.progress=false",
    )
    train(cluster, tmp_path, *four, "run_dir=local_four")
    run(cluster, tmp_path, *SRUN, "--ntasks-per-node=2", *RUNNER, "train", *four)
    (made,) = (tmp_path / "outputs" / "four").iterdir()
    assert made.name.startswith("job_")
    assert record(made)["layout"]["world_size"] == 4
    assert_equal(made, tmp_path / "local_four")


@pytest.mark.slow
def test_ranks_that_cannot_meet_say_why(cluster: Cluster, tmp_path: Path) -> None:
    """A name that no node knows, and a rank that never comes; each within the time that was given."""
    words = (*SRUN, "--ntasks-per-node=1", "--kill-on-bad-exit=0")
    trained = (*RUNNER, "train", *PLAIN, "parallelism.pipeline=2")
    lost = run(cluster, tmp_path, *words, "--export=ALL,MASTER_ADDR=nowhere.invalid", *trained, status=1)
    assert "rank 1 on n2 cannot resolve nowhere.invalid" in lost.stderr
    late = "if [ $SLURM_PROCID = 1 ]; then exit 0; fi; exec " + " ".join(trained)
    alone = run(cluster, tmp_path, *words, "bash", "-c", f"{late} launcher.rendezvous_timeout_seconds=2", status=1)
    assert "rank 0 on n1 waited 2 s for 1 of 2 ranks that did not come: 1" in alone.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_layout_that_is_not_the_plans_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    words = (*SRUN, "--ntasks-per-node=1", *RUNNER, "train", *PLAIN)
    refused = run(cluster, tmp_path, *words, "parallelism.pipeline=4", status=2)
    assert "2 x 1 ranks on n[1-2]; the plan: pipeline 4 x data 1 x tensor 1" in refused.stderr
    assert "parallelism = 4 x 1 x 1: the product of the degrees, 4, must be the number of ranks, 2" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_prints_the_script_that_would_be_submitted(cluster: Cluster, tmp_path: Path) -> None:
    asked = {
        "time_limit": "1:30:00",
        "partition": "high",
        "account": "lab",
        "gpus_per_node": "2",
        "signal_seconds": "45",
        "sbatch": '["--mem=0","--exclusive"]',
    }
    overrides = [f"launcher.{key}={value}" for key, value in asked.items()]
    printed = train(
        cluster, tmp_path, *PLAIN, *SLURM, *overrides, "parallelism.pipeline=4", "launcher.dry_run=true"
    ).stdout.splitlines()
    assert printed[0] == "#!/bin/bash"
    for option in ("nodes=2", "ntasks-per-node=2", "time=1:30:00", "partition=high", "account=lab", "gpus-per-node=2"):
        assert f"#SBATCH --{option}" in printed
    assert {"#SBATCH --signal=USR1@45", "#SBATCH --mem=0", "#SBATCH --exclusive"} <= set(printed)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_sbatch_refuses_is_told(cluster: Cluster, tmp_path: Path) -> None:
    refused = train(
        cluster, tmp_path, *PLAIN, *SLURM, "launcher.partition=none", "parallelism.pipeline=2", "run_dir=r", status=1
    )
    assert "sbatch did not take" in refused.stderr
    assert "invalid partition specified: none" in refused.stderr
    assert record(tmp_path / "r")["status"] == "failed"
    assert log(tmp_path / "r") == ""
