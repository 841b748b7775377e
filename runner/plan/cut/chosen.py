"""The partition that a plan chose, kept in the run's directory so that all ranks have the same stages."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from runner.config.schema import PartitionConfig, RunConfig
from runner.plan.cut.partition import Partition

__all__ = [
    "AUTO",
    "FIXED",
    "PARTITION_FILE",
    "partition_to_json",
    "read_partition",
    "with_chosen_partition",
    "with_partition",
]

AUTO = "auto"
FIXED = ("uniform", "manual")
"""Policies whose stages follow from the request and the number of layers alone."""

PARTITION_FILE = "partition.json"


def with_partition(config: RunConfig, layers: Partition) -> RunConfig:
    """The request with the boundaries that its plan chose; unchanged if the request itself says them."""
    if config.partition.name in FIXED:
        return config
    changed = copy.copy(config)
    changed.partition = PartitionConfig("manual", boundaries=[first for first, _ in layers[1:]])
    return changed


def with_chosen_partition(config: RunConfig, run_dir: Path) -> RunConfig:
    """The request with the boundaries that were written when the run was planned."""
    if config.partition.name in FIXED:
        return config
    return with_partition(config, read_partition(run_dir))


def read_partition(run_dir: Path) -> Partition:
    """The partition that a run's plan chose. Raises FileNotFoundError if the request itself says it."""
    stored = json.loads((run_dir / PARTITION_FILE).read_text(encoding="utf-8"))
    return tuple((first, last) for first, last in stored)


def partition_to_json(layers: Partition) -> str:
    """First and last layer of each stage, inclusive, as in ``runner plan --json``."""
    return json.dumps([list(each) for each in layers])
