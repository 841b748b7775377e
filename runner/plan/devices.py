"""The devices of a pipeline's ranks, where ``hardware.devices`` says that they are unlike."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, permutations
from typing import TypeVar

from runner.config.schema import RunConfig
from runner.config.units import format_bytes, parse_bytes
from runner.schedule.simulation.clock import StageCosts

__all__ = [
    "MOST_ORDERS",
    "DeviceClass",
    "devices_of",
    "emulation_notes",
    "limits_of",
    "orders_of",
    "told",
    "unlike_orders",
    "with_devices",
    "with_speeds",
]

Device = TypeVar("Device")

MOST_ORDERS = 120
"""The most orders of devices that are compared; five unlike devices have as many."""


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What is known of the device of one rank of the pipeline, and of its replicas.

    Args:
        name: the name of its class.
        speed: how fast it computes, in parts of the described device's speed.
        memory_bytes: its memory; None: as the described device.
    """

    name: str
    speed: float
    memory_bytes: int | None


def devices_of(config: RunConfig) -> tuple[DeviceClass, ...]:
    """The device of each rank of the pipeline: as named, else in the order of the classes; empty if all are alike."""
    classes = {each.name: each for each in config.hardware.devices}
    named = config.parallelism.devices
    if named is None:
        named = [each.name for each in classes.values() for _ in range(each.count // config.parallelism.data)]
    return tuple(
        DeviceClass(name, classes[name].speed, None if (size := classes[name].memory_bytes) is None else int(size))
        for name in named
    )


def orders_of(config: RunConfig) -> list[tuple[DeviceClass, ...]]:
    """The orders of devices that a plan compares: the named one, or all unlike ones.

    Of more than :data:`MOST_ORDERS`, it is those in which the ranks of a class are neighbours, as many at most.
    """
    first = devices_of(config)
    if config.parallelism.devices is not None:
        return [first]
    found = list(islice(unlike_orders(first), MOST_ORDERS + 1))
    if len(found) <= MOST_ORDERS:
        return found
    classes = permutations(dict.fromkeys(first))
    blocks = (tuple(each for name in order for each in first if each == name) for order in classes)
    return list(islice(blocks, MOST_ORDERS))


def unlike_orders(devices: Sequence[Device]) -> Iterator[tuple[Device, ...]]:
    """All orders of some devices, each once where several of them are alike."""
    if not devices:
        yield ()
    for device in dict.fromkeys(devices):
        at = list(devices).index(device)
        for others in unlike_orders([*devices[:at], *devices[at + 1 :]]):
            yield (device, *others)


def with_devices(config: RunConfig, devices: Sequence[DeviceClass]) -> RunConfig:
    """The request with the order of devices that its plan chose; unchanged if it says it, or if all are alike."""
    if not devices or config.parallelism.devices is not None:
        return config
    parallelism = copy.copy(config.parallelism)
    parallelism.devices = [each.name for each in devices]
    return replace(config, parallelism=parallelism)


def limits_of(config: RunConfig, devices: Sequence[DeviceClass], limit_bytes: int) -> tuple[int, ...]:
    """The memory limit of each rank of the pipeline: that of its class, and never more than ``memory_limit``.

    Args:
        config: the request.
        devices: see :func:`devices_of`; not empty.
        limit_bytes: the limit of a rank whose class says nothing of memory.
    """
    most = None if config.memory_limit is None else parse_bytes(config.memory_limit)
    own = [limit_bytes if each.memory_bytes is None else each.memory_bytes for each in devices]
    return tuple(each if most is None else min(each, most) for each in own)


def with_speeds(costs: StageCosts, devices: Sequence[DeviceClass], placement: Sequence[int]) -> StageCosts:
    """The costs of the described device, as they are on the devices of a pipeline; messages take as long.

    Args:
        costs: durations of each stage.
        devices: see :func:`devices_of`; empty: all are alike.
        placement: the rank of each stage.
    """
    if not devices:
        return costs

    def on(seconds: Sequence[float]) -> list[float]:
        return [each / devices[rank].speed for each, rank in zip(seconds, placement, strict=True)] if seconds else []

    return replace(costs, F=on(costs.F), B=on(costs.B), I=on(costs.I), W=on(costs.W), step=on(costs.step))


def told(devices: Sequence[DeviceClass]) -> str:
    """The classes of some devices, each with its speed and memory once."""
    sizes = {each: "" if each.memory_bytes is None else f", {format_bytes(each.memory_bytes)}" for each in devices}
    return "; ".join(f"{each.name}: {each.speed:g} of the speed{size}" for each, size in sizes.items())


def emulation_notes(devices: Sequence[DeviceClass], *, accelerated: bool) -> tuple[str, ...]:
    """A note about unlike devices of a run on one machine's CPU, which has one kind of device."""
    if not devices or accelerated:
        return ()
    order = ", ".join(each.name for each in devices)
    line = f"devices ({order}) are emulated on this machine: nothing enforces their limits of memory"
    slow = dict.fromkeys(f"{each.name} {1 / each.speed - 1:.3g} times" for each in devices if each.speed < 1)
    sleeps = "ranks of slower classes sleep after each computation and update"
    return (f"{line}; {sleeps}, {', '.join(slow)} as long as it took" if slow else line,)
