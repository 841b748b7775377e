"""A request whose partition is the one that a plan chose."""

from __future__ import annotations

import copy

from runner.config.schema import PartitionConfig, RunConfig
from runner.plan.cut.partition import Partition

__all__ = ["AUTO", "FIXED", "with_partition"]

AUTO = "auto"
FIXED = ("uniform", "manual")
"""Policies whose stages follow from the request and the number of layers alone."""


def with_partition(config: RunConfig, layers: Partition) -> RunConfig:
    """The request with the boundaries that its plan chose; unchanged if the request itself says them."""
    if config.partition.name in FIXED:
        return config
    changed = copy.copy(config)
    changed.partition = PartitionConfig("manual", boundaries=[first for first, _ in layers[1:]])
    return changed
