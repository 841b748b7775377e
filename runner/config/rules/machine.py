"""Rules of ``hardware``, ``transport`` and ``cost``: properties of a machine, and durations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.rules.values import not_negative, positive
from runner.config.schema import CostConfig, RunConfig
from runner.errors import Problem

__all__ = ["MACHINE"]

_SPEEDS = ("link", "memory", "network", "host_link", "host_memory")
_COSTS = tuple(field.name for field in fields(CostConfig))


def _flops(config: RunConfig) -> Iterator[Problem]:
    for precision, flops in config.hardware.flops.items():
        if not (flops > 0 and math.isfinite(flops)):
            path = f"hardware.flops.{precision}"
            yield Problem(path, flops, "must be a finite number above 0")


def _size(path: str, fix: str) -> tuple[Row[RunConfig], ...]:
    """Rules for the size of a memory in bytes; a value below 1 is a mistake in the unit."""

    def is_fraction(config: RunConfig) -> bool:
        size = value_at(config, path)
        return size is not None and 0 < size < 1

    return positive(path, fix), Row(path, is_fraction, "must be at least 1 byte", fix=f"{path}={fix}")


MACHINE: Table[RunConfig] = Table(
    "Machine, link and costs",
    (
        Computed("hardware.flops.PRECISION", _flops, "must be a finite number above 0"),
        *_size("hardware.memory_bytes", "8e9"),
        *_size("hardware.host_memory_bytes", "1e12"),
        *(positive(f"hardware.{name}_bytes_per_second", "1e9") for name in _SPEEDS),
        positive("hardware.devices_per_node", "8"),
        not_negative("hardware.link_latency_seconds"),
        not_negative("transport.delay_seconds"),
        positive("transport.bytes_per_second", "1e9"),
        *(not_negative(f"cost.{key}") for key in _COSTS),
        Row(
            "cost.F",
            lambda c: c.cost.F == c.cost.B == 0,
            "must be above 0 where cost.B is 0",
            "Nothing would take any time",
            fix="cost.F=1",
            value=lambda c: 0,
        ),
    ),
)
