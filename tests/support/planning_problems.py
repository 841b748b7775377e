"""Drawn planning problems, and every cut and every sharing of devices, for tests of planners."""

from __future__ import annotations

import random
from collections.abc import Iterator

from runner.plan.planners.values import Division, Kept, Line, Order, PlanningProblem
from runner.plan.time.network import one_link
from runner.plan.values import Link

__all__ = ["cuts", "figures", "problem", "shares"]


def problem(seed: int, *, layers: int = 5, ranks: int = 4, tight: bool = False) -> PlanningProblem:
    draw = random.Random(seed)
    numbers = [draw.uniform(0.5, 2.0) for _ in range(layers)]
    weights = [draw.uniform(0.5, 3.0) for _ in range(layers)]
    boundary = tuple(draw.uniform(0.05, 1.0) for _ in range(layers))

    def way(name: str, again: float, saved: float, tensor: int) -> Kept:
        backward = tuple(Line(0.0, (2 + again) * each / tensor) for each in numbers)
        half = tuple(Line(0.0, each / 2) for _, each in backward)
        kept = (Line(0.0, saved),) * layers
        return Kept(name, True, kept, kept, (Line(0.0, 0.1),) * layers, backward, half, half)

    def of(tensor: int) -> Division:
        size = tuple(each / tensor for each in weights)
        forward = tuple(Line(0.02 * tensor, each / tensor) for each in numbers)
        kept = (way("none", 0.0, 0.5, tensor), way("full", 1.0, 0.1, tensor))
        return Division(tensor, forward, size, size, tuple(2 * each for each in size), boundary, kept)

    limit = int((1.2 if tight else 10) * 4 * sum(weights)) + 4
    memory = dict.fromkeys((1, 2, 4, 8), limit)
    orders = (Order("1f1b", 1),)
    return PlanningProblem(
        tuple(map(str, range(layers))), (of(1), of(2)), ranks, 8, memory, one_link(Link(0.0, 4.0)), orders
    )


def cuts(layers: int) -> Iterator[list[tuple[int, int]]]:
    """Every cut into ranges, the end excluded."""
    for mask in range(1 << (layers - 1)):
        ends = [at + 1 for at in range(layers - 1) if mask >> at & 1] + [layers]
        yield list(zip([0, *ends], ends, strict=False))


def shares(stages: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Every way to give so many devices to stages, each at least one."""
    if stages == 1:
        yield (devices,)
        return
    for own in range(1, devices - stages + 2):
        yield from ((own, *rest) for rest in shares(stages - 1, devices - own))


def figures(of: PlanningProblem, samples: float, tensor: int = 1, way: int = 0) -> list[tuple[float, float, float]]:
    """Seconds, weight and message of each layer, without the planners' sums."""
    division = next(each for each in of.divisions if each.tensor == tensor)
    kept = division.kept[way]
    speed = of.link.bytes_per_second
    assert speed is not None
    return [
        (f.constant + samples * f.each + b.constant + samples * b.each, weight, samples * sent / speed)
        for f, b, weight, sent in zip(division.forward, kept.backward, division.weight, division.boundary, strict=True)
    ]
