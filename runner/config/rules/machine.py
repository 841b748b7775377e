"""Rules of ``hardware``, ``transport`` and ``cost``: properties of a machine, and durations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from runner.config.links import ALL, group_size
from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.rules.values import not_negative, positive
from runner.config.schema import CostConfig, LinkClassConfig, RunConfig
from runner.errors import Problem

__all__ = ["MACHINE"]

_SPEEDS = ("link", "memory", "network", "host_link", "host_memory")
_COSTS = tuple(field.name for field in fields(CostConfig))


def _flops(config: RunConfig) -> Iterator[Problem]:
    for precision, flops in config.hardware.flops.items():
        if not (flops > 0 and math.isfinite(flops)):
            path = f"hardware.flops.{precision}"
            yield Problem(path, flops, "must be a finite number above 0")


def _links(config: RunConfig) -> Iterator[Problem]:
    """Problems of each class of links by itself, and then of their order."""
    classes = config.hardware.links
    own = [problem for at, each in enumerate(classes) for problem in _class_problems(at, each)]
    yield from own
    for at, each in enumerate(classes):
        if each.name.strip() and each.name in [other.name for other in classes[:at]]:
            why = "Messages and tables name the class"
            yield Problem(f"hardware.links[{at}].name", each.name, "must not be the name of another class", why)
    if not any(problem.path.endswith(".ranks") for problem in own):
        yield from _order_problems(classes)
        yield from _outermost_problems(config)


def _class_problems(at: int, each: LinkClassConfig) -> Iterator[Problem]:
    """The values of class ``at`` that are wrong by themselves."""
    path = f"hardware.links[{at}]"
    if not each.name.strip():
        yield Problem(
            f"{path}.name", each.name, "must be given", "Messages and tables name the class", f"name: link_{at}"
        )
    if each.ranks != ALL and not (each.ranks.isdecimal() and int(each.ranks) > 0):
        rule, why = f"must be a whole number above 0, or {ALL}", "It is the number of neighbouring ranks of a group"
        yield Problem(f"{path}.ranks", each.ranks or None, rule, why, "ranks: 8")
    if not (each.latency_seconds >= 0 and math.isfinite(each.latency_seconds)):
        rule = "must be a finite number, 0 or above"
        yield Problem(f"{path}.latency_seconds", each.latency_seconds, rule, fix="latency_seconds: 5e-6")
    if not (each.bytes_per_second > 0 and math.isfinite(each.bytes_per_second)):
        rule = "must be a finite number above 0"
        yield Problem(f"{path}.bytes_per_second", each.bytes_per_second, rule, fix="bytes_per_second: 1e9")


def _order_problems(classes: Sequence[LinkClassConfig]) -> Iterator[Problem]:
    for at, (inner, outer) in enumerate(zip(classes, classes[1:], strict=False), start=1):
        few, many, path = group_size(inner), group_size(outer), f"hardware.links[{at}].ranks"
        if few is None:
            why = f"Class {inner.name} before it holds all ranks already: classes go from inside to outside"
            yield Problem(path, outer.ranks, "must be of a class that is used", why, "the classes in the other order")
        elif many is not None and many <= few:
            why = f"Class {inner.name} before it has {few}: classes go from inside to outside"
            yield Problem(path, outer.ranks, f"must be more than {few}", why, f"ranks: {2 * few}")
        elif many is not None and many % few:
            why = f"Its groups are made of whole groups of class {inner.name}, which have {few}"
            yield Problem(path, outer.ranks, f"must be a multiple of {few}", why, f"ranks: {-(-many // few) * few}")


def _outermost_problems(config: RunConfig) -> Iterator[Problem]:
    """The last class holds all ranks, or nothing would be known of the links between its groups."""
    degrees, classes = config.parallelism, config.hardware.links
    searched = degrees.name == "auto"
    ranks = degrees.ranks if searched else degrees.pipeline * degrees.data * degrees.tensor
    size = group_size(classes[-1]) if classes else None
    if size is not None and (ranks is None or size < ranks):
        known = "all ranks" if ranks is None else f"all {ranks} ranks"
        why = f"Nothing is said of links between groups of class {classes[-1].name}"
        path = f"hardware.links[{len(classes) - 1}].ranks"
        yield Problem(path, classes[-1].ranks, f"must hold {known}", why, f"ranks: {ALL}")


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
        Computed(
            "hardware.links",
            _links,
            "must be classes from inside to outside, each with a name of its own, ranks, bytes_per_second above 0 and "
            "latency_seconds of 0 or above; ranks are a multiple of those of the class before, and all in the last one",
            "Two ranks use the first class of which one group holds both",
        ),
        not_negative("hardware.link_latency_seconds"),
        not_negative("transport.delay_seconds"),
        positive("transport.bytes_per_second", "1e9"),
        Row(
            "transport.emulate_links",
            lambda c: c.transport.emulate_links and not c.hardware.links,
            "must be false without hardware.links",
            "Its classes are the links that are emulated",
            fix="transport.emulate_links=false",
        ),
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
