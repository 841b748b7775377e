"""A request whose partition is the one that a plan chose."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

from runner.config.schema import RunConfig
from runner.plan.cut.partition import Partition
from runner.plan.devices import DeviceClass, with_devices

__all__ = ["AUTO", "FIXED", "with_partition"]

AUTO = "auto"
FIXED = ("uniform", "manual")
"""Policies whose stages follow from the request and the number of layers alone."""


def with_partition(config: RunConfig, layers: Partition, devices: Sequence[DeviceClass] = ()) -> RunConfig:
    """The request with the boundaries, and the order of devices, that its plan chose; what it says itself stays."""
    config = with_devices(config, devices)
    if config.partition.name in FIXED:
        return config
    changed = copy.copy(config)
    changed.partition = replace(config.partition, name="manual", boundaries=[first for first, _ in layers[1:]])
    return changed
