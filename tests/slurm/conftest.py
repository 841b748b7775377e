"""One cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import Cluster, missing, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running SLURM of two nodes; skips, with the packages that would help, where it cannot start."""
    why = missing()
    if why:
        pytest.skip(why)
    with running_cluster() as running:
        yield running
