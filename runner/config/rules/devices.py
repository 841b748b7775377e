"""Rules of ``hardware.devices``, classes of unlike devices, and of what cannot be planned with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table, value_at
from runner.config.schema import DeviceClassConfig, RunConfig
from runner.errors import Problem

__all__ = ["DEVICE_TABLES"]

_OF_PLAN = ("auto", "uniform", "manual")
_TELL_APART = ("hetpipe", "pipe_torch")  # planners of unlike devices


def _classes(config: RunConfig) -> Iterator[Problem]:
    """Problems of each class by itself, and then of their number."""
    classes = config.hardware.devices
    for at, each in enumerate(classes):
        yield from _class_problems(f"hardware.devices[{at}]", each)
        if each.name.strip() and each.name in [other.name for other in classes[:at]]:
            why = "parallelism.devices and tables name the class"
            yield Problem(f"hardware.devices[{at}].name", each.name, "must not be the name of another class", why)
    if all(each.count > 0 for each in classes):
        yield from _count_problems(config)


def _count_problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the counts beside the degrees."""
    classes, degrees = config.hardware.devices, config.parallelism
    counted, data = sum(each.count for each in classes), max(1, degrees.data)
    if degrees.name == "auto":
        data, ranks = 1, degrees.ranks or counted
    else:
        ranks = degrees.pipeline * data
    if classes and counted != ranks and degrees.name == "auto":
        rule, why = f"must have {ranks} devices, as there are ranks; their counts make {counted}", "All are shared out"
        yield Problem("hardware.devices", _told(config), rule, why, f"parallelism.ranks={counted}")
    elif classes and counted != ranks:
        fix = f"parallelism.pipeline={counted // data}" if counted % data == 0 else f"parallelism.pipeline={counted}"
        rule = f"must have as many devices as there are ranks, {ranks}; their counts make {counted}"
        yield Problem("hardware.devices", _told(config), rule, "Each rank has a device of one class", fix)
    for at, each in enumerate(classes):
        if counted == ranks and each.count % data:
            rule, why = (
                f"must be a multiple of parallelism.data, {data}",
                "Replicas of a stage have devices of one class",
            )
            yield Problem(f"hardware.devices[{at}].count", each.count, rule, why, f"count: {data}")


def _class_problems(path: str, each: DeviceClassConfig) -> Iterator[Problem]:
    if not each.name.strip():
        why = "parallelism.devices and tables name the class"
        yield Problem(f"{path}.name", each.name, "must be given", why, "name: slow")
    if each.count < 1:
        why = "It is the number of ranks that have such a device"
        yield Problem(f"{path}.count", each.count, "must be at least 1", why, "count: 1")
    if not 0 < each.speed <= 1:
        rule, why = "must be above 0 and at most 1", "The described device is the fastest, and others are parts of it"
        yield Problem(f"{path}.speed", each.speed, rule, why, "speed: 0.5")
    size = each.memory_bytes
    if size is not None and not (size >= 1 and math.isfinite(size)):
        yield Problem(f"{path}.memory_bytes", size, "must be at least 1 byte", fix="memory_bytes: 8e9")


def _told(config: RunConfig) -> str:
    return f"[{', '.join(f'{each.count} x {each.name}' for each in config.hardware.devices)}]"


def _order(config: RunConfig) -> Iterator[Problem]:
    """Problems of the classes by rank of the pipeline; classes that are wrong by themselves are told before."""
    path, named, classes = "parallelism.devices", config.parallelism.devices, config.hardware.devices
    data = max(1, config.parallelism.data)
    if named is None or any(each.count < 1 or each.count % data for each in classes):
        return
    shown = f"[{', '.join(named)}]"
    counts = {each.name: each.count // data for each in classes}
    fix = f"{path}=[{','.join(each.name for each in classes for _ in range(each.count // data))}]"
    unknown = [name for name in named if name not in counts]
    if not classes:
        why = "All devices are alike, and no class has a name"
        yield Problem(path, shown, "belongs to hardware.devices", why, "hardware.devices=[{name: slow, speed: 0.5}]")
    elif config.parallelism.name == "auto":
        why = "The planner chooses the class of each stage"
        yield Problem(path, shown, "must be null with parallelism=auto", why, f"{path}=null")
    elif unknown:
        yield Problem(path, shown, f"must be classes of hardware.devices; {unknown[0]} is none", "", fix)
    elif Counter(named) != Counter(counts):
        rule = f"must name the class of each rank of the pipeline, as often as the counts say: {_told(config)}"
        yield Problem(path, shown, rule, "Replicas of a stage have devices of one class", fix)


def _alike(path: str, needed: object, why: str) -> Row[RunConfig]:
    """The rule that a key has its default value where devices are unlike."""
    shown = "null" if needed is None else str(needed)
    return Row(
        path,
        lambda c: value_at(c, path) != needed,
        f"must be {shown} with hardware.devices",
        why,
        fix=f"{path}={shown}",
    )


_OWN_HOST = "A class does not say how fast its host, and the link to it, are"

DEVICE_TABLES: tuple[Table[RunConfig], ...] = (
    Table(
        "Classes of unlike devices",
        (
            Computed(
                "hardware.devices",
                _classes,
                "must be classes, each with a name of its own, a count of 1 or more, a speed above 0 and at most 1, "
                "and memory_bytes of 1 or more if given; the counts make the ranks of the run, each a multiple of the "
                "replicas",
                "Each rank has a device of one class, and replicas of a stage have devices of the same",
            ),
            Computed(
                "parallelism.devices",
                _order,
                "must name the class of each rank of the pipeline, each of hardware.devices as often as its count says",
                "Replicas of a stage have devices of one class",
            ),
        ),
    ),
    Table(
        "What is not planned with unlike devices",
        (
            Row(
                "hardware.devices",
                lambda c: c.parallelism.name == "auto" and c.planner.name not in _TELL_APART,
                "must be empty with planner={planner.name}",
                "The search gives all ranks the same device. The plan of a pipeline finds the order of devices, and "
                "the cut for it; planner=hetpipe and planner=pipe_torch share unlike devices out",
                fix="parallelism=pipeline",
                value=_told,
            ),
            _alike(
                "parallelism.tensor", 1, "What ranks that divide a layer exchange takes as long on each class of device"
            ),
            Row(
                "partition",
                lambda c: c.partition.name not in _OF_PLAN,
                "must be auto, uniform or manual with hardware.devices",
                "The policy {partition.name} balances stages as if their devices were alike",
                fix="partition=auto",
            ),
            _alike("zero.stage", None, "What its updates take follows from hardware.memory_bytes_per_second alone"),
            _alike("offload.optimizer", "none", _OWN_HOST),
            _alike("offload.parameters", "none", _OWN_HOST),
            _alike("offload.activations", "none", _OWN_HOST),
            _alike("offload.weights", "none", _OWN_HOST),
            _alike("launcher.name", "local", "SLURM decides which rank gets which device"),
        ),
        applies=lambda c: bool(c.hardware.devices),
    ),
)
