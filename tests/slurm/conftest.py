"""One cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_runs import SKEWED, train
from slurm_cluster import Cluster, missing, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running SLURM of two nodes; skips, with the packages that would help, where it cannot start."""
    why = missing()
    if why:
        pytest.skip(why)
    with running_cluster() as running:
        yield running


@pytest.fixture(scope="session")
def reference(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the tests' training in one process of this machine."""
    directory = tmp_path_factory.mktemp("reference")
    train(cluster, directory, *SKEWED, "schedule.microbatches=2", "run_dir=run")
    return directory / "run"
