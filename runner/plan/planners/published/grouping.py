"""How HetPipe groups unlike devices into workers, and what a step takes with each grouping.

``NP`` (node partition) makes a worker of all devices of one class, as a node has them: workers differ in speed. ``ED``
(equal distribution) gives every worker as many devices of each class: workers are alike. ``HD`` (hybrid distribution)
pairs a fast class with a slow one, and makes two workers of each pair: workers are nearly alike, and each has two
classes. All workers wait for the slowest one. The order of a worker's devices is the best of all.

Source: Park et al. 2020, HetPipe, as the surveys tell it (reconstruction).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from math import gcd
from typing import NamedTuple

import numpy as np

from runner.plan.devices import MOST_ORDERS, unlike_orders
from runner.plan.planners.published.chain import Chain, Stages, divisors, least_in_order
from runner.plan.planners.values import Device
from runner.schedule.simulation.batched import Numbers

__all__ = ["Grouped", "Worker", "exchange", "grouped", "groupings", "held_by", "least_slowest", "way"]

Worker = tuple[Device, ...]
"""The devices of one worker; their order is to be chosen."""


class Grouped(NamedTuple):
    """A way to group devices, as its slowest worker sees it.

    Args:
        seconds: the length of a step.
        stages: first and last layer of each stage.
        devices: the device of each stage.
        workers: how many workers there are.
        alike: whether all workers have the same devices.
    """

    seconds: float
    stages: Stages
    devices: Worker
    workers: int
    alike: bool


def groupings(devices: Sequence[Device]) -> Iterator[tuple[str, list[Worker]]]:
    """The ways to group devices, by their names, with the devices of each worker."""
    classes = Counter(devices)
    yield "NP", [(device,) * count for device, count in classes.items()]
    for workers in divisors(gcd(*classes.values()))[1:] or [1]:
        own = tuple(device for device, count in classes.items() for _ in range(count // workers))
        yield "ED", [own] * workers
    counts, by_speed = set(classes.values()), sorted(classes, key=lambda device: device.speed)
    if len(counts) == 1 and len(classes) % 2 == 0 and (count := counts.pop()) % 2 == 0:
        half, middle = count // 2, len(classes) // 2
        pairs = zip(by_speed[:middle], reversed(by_speed[middle:]), strict=True)
        yield "HD", [(slow,) * half + (fast,) * half for slow, fast in pairs for _ in range(2)]


def grouped(chain: Chain, workers: Sequence[Worker], count: int) -> Grouped | None:
    """What a step of ``count`` micro-batches, shared evenly, takes the slowest worker; None if nothing fits one."""
    kinds = list(dict.fromkeys(workers))
    found = [_in_best_order(chain, own, count // len(workers), len(workers)) for own in kinds]
    fitting = [each for each in found if each is not None]
    if len(fitting) < len(kinds):
        return None
    return max(fitting, key=lambda each: each.seconds)._replace(alike=len(kinds) == 1)


def _in_best_order(chain: Chain, devices: Worker, microbatches: int, workers: int) -> Grouped | None:
    """What a step takes a worker with its devices in the best order; None if nothing fits.

    A micro-batch takes the slowest stage, or the way through all stages over those that are under way.

    Args:
        chain: the layers.
        devices: the worker's devices.
        microbatches: the micro-batches of a step; no more are under way.
        workers: how many workers there are.
    """
    size = len(devices)
    best: Grouped | None = None
    if size > len(chain.problem.layers):
        return None
    for order in islice(unlike_orders(devices), MOST_ORDERS):
        for under_way in range(1, min(2 * size - 1, microbatches) + 1):
            found = least_slowest(chain, order, under_way)
            if found is None:
                break  # more micro-batches need more memory
            slowest, stages = found
            each = max(slowest, way(chain, stages, order) / under_way)
            seconds = microbatches * each + exchange(chain, stages, workers)
            if best is None or seconds < best.seconds:
                best = Grouped(seconds, stages, order, workers, alike=False)
    return best


def way(chain: Chain, stages: Stages, order: Worker) -> float:
    """Seconds of a micro-batch alone, there and back through all stages."""
    pairs = zip(stages, order, strict=True)
    computed = sum(chain.seconds(first, last + 1) / device.speed for (first, last), device in pairs)
    return computed + sum(2 * chain.message(last + 1) for _, last in stages[:-1])


def least_slowest(chain: Chain, order: Worker, under_way: int) -> tuple[float, Stages] | None:
    """The least slowest stage, with its messages, of devices in this order, and the stages; None if nothing fits.

    Args:
        chain: the layers.
        order: the device of each stage.
        under_way: the micro-batches that are under way.
    """
    layers = len(chain.problem.layers)
    sent = np.array([0.0, *(2 * chain.message(at) for at in range(1, layers)), 0.0])
    compute, saved = chain.ranges("forward") + chain.ranges("backward"), chain.ranges("saved")
    states = chain.ranges("weight") + chain.ranges("gradient") + chain.ranges("state") + chain.working()
    costs: list[Numbers] = []
    for stage, device in enumerate(order):
        peak = states + held_by(stage, len(order), under_way) * saved
        seconds = compute / device.speed + sent[:, None] + sent[None, :]
        costs.append(np.where(peak <= device.memory, seconds, np.inf))
    return least_in_order(costs)


def held_by(stage: int, size: int, under_way: int) -> int:
    """The micro-batches between their forward and their backward on a stage, if all stages take as long."""
    return min(under_way, 2 * (size - stage) - 1)


def exchange(chain: Chain, stages: Stages, workers: int) -> float:
    """Seconds in which a worker pushes its changes and pulls weights, all stages at the same time."""
    if workers == 1:
        return 0.0
    link = chain.problem.link
    return max(2 * link.seconds(chain.total("weight", first, last + 1)) for first, last in stages)
