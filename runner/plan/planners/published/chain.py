"""What all published planners read: sums over ranges of layers in one setting, and the numbers they may choose from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from runner.plan.planners.values import Division, Order, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = [
    "Chain",
    "Stages",
    "answer_of",
    "divisors",
    "even_cut",
    "given_microbatches",
    "least_in_order",
    "least_slowest",
    "powers_of_two",
    "ways_of",
    "with_microbatches",
]

Stages = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chain:
    """The layers of one division with micro-batches of so many samples. Ranges are from ``first`` up to ``end``.

    Args:
        problem: the problem.
        division: the layers, divided among so many ranks.
        samples: the samples of a micro-batch.
        kept: the place of the way to keep, in the division.
    """

    problem: PlanningProblem
    division: Division
    samples: float
    kept: int = 0

    @cached_property
    def _sums(self) -> dict[str, list[float]]:
        division, kept = self.division, self.division.kept[self.kept]
        of = {
            "forward": [line.of(self.samples) for line in division.forward],
            "backward": [line.of(self.samples) for line in kept.backward],
            "weight": division.weight,
            "gradient": division.gradient,
            "state": division.state,
            "saved": [line.of(self.samples) for line in kept.saved],
        }
        return {name: list(accumulate(values, initial=0.0)) for name, values in of.items()}

    def total(self, name: str, first: int, end: int) -> float:
        """The sum of ``forward``, ``backward``, ``weight``, ``gradient``, ``state`` or ``saved`` over a range."""
        sums = self._sums[name]
        return sums[end] - sums[first]

    def ranges(self, name: str) -> Numbers:
        """The same for all ranges at once, shape (layers + 1, layers + 1); infinite where a range is empty."""
        sums = np.array(self._sums[name])
        found: Numbers = np.where(sums[None, :] >= sums[:, None], sums[None, :] - sums[:, None], 0.0)
        return found + self._no_range

    @cached_property
    def _no_range(self) -> Numbers:
        places = np.arange(len(self.problem.layers) + 1)
        return np.where(places[None, :] > places[:, None], 0.0, np.inf)

    def seconds(self, first: int, end: int) -> float:
        """Seconds of a forward and a backward."""
        return self.total("forward", first, end) + self.total("backward", first, end)

    def held(self, first: int, end: int) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return sum(self.total(name, first, end) for name in ("weight", "gradient", "state"))

    def working(self) -> float:
        """The most bytes of a layer beside what it saves."""
        return max(line.of(self.samples) for line in self.division.kept[self.kept].working)

    def message(self, end: int) -> float:
        """Seconds of the message after the layers before ``end``; 0 after the last."""
        return self.problem.link.seconds(self.message_bytes(end))

    def message_bytes(self, end: int) -> float:
        """Bytes of that message."""
        return self.samples * self.division.boundary[end - 1]

    def peak(self, first: int, end: int, in_flight: int) -> float:
        """Bytes of a stage with so many micro-batches in flight."""
        return self.held(first, end) + in_flight * self.total("saved", first, end) + self.working()

    def sum_seconds(self, first: int, end: int, replicas: int) -> float:
        """Seconds of the sum of a range's gradients over replicas, in a ring."""
        size = self.total("gradient", first, end)
        return 2 * (replicas - 1) * self.problem.link.seconds(size / replicas) if replicas > 1 else 0.0


def least_slowest(
    layers: int, devices: int, cost: Callable[[int, int], Numbers]
) -> tuple[float, Stages, tuple[int, ...]]:
    """The least slowest stage on exactly so many devices, with the stages and the replicas of each.

    Args:
        layers: the number of layers.
        devices: the number of devices.
        cost: seconds of a stage by its first layer and its end: for each number of replicas from 0 to ``devices``, of
            which that for 0 is not read; or, of devices in an order, for the numbers before the stage and to its end.
    """
    counts = np.arange(devices + 1)
    own = counts[None, :] - counts[:, None]  # [before, after]
    best = np.full((layers + 1, devices + 1), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((layers + 1, devices + 1, 2), dtype=np.int64)
    for end in range(1, layers + 1):
        for first in range(end):
            known = cost(first, end)
            seconds = np.where(own > 0, known[own] if known.ndim == 1 else known, np.inf)
            worst = np.maximum(best[first][:, None], seconds)
            before = worst.argmin(axis=0)
            least = worst[before, counts]
            better = least < best[end]
            best[end, better] = least[better]
            came[end, better, 0], came[end, better, 1] = first, before[better]
    stages, replicas, end, left = list[tuple[int, int]](), list[int](), layers, devices
    while end > 0:
        first, before_it = came[end, left].tolist()
        stages.insert(0, (first, end - 1))
        replicas.insert(0, left - before_it)
        end, left = first, before_it
    return float(best[layers, devices]), tuple(stages), tuple(replicas)


def least_in_order(costs: Sequence[Numbers]) -> tuple[float, Stages] | None:
    """The least slowest stage if the q-th stage of a range takes ``costs[q][first, end]``, and the stages.

    Returns:
        None if no cut has a finite cost.
    """
    best = costs[0][0]
    came = list[NDArray[np.int64]]()
    for cost in costs[1:]:
        worst = np.maximum(best[:, None], cost)
        before = worst.argmin(axis=0)
        came.append(before)
        best = worst[before, np.arange(len(before))]
    if not np.isfinite(best[-1]):
        return None
    ends = [len(best) - 1]
    for before in reversed(came):
        ends.insert(0, int(before[ends[0]]))
    return float(best[-1]), tuple((first, end - 1) for first, end in zip([0, *ends], ends, strict=False))


_FOR_EACH = 4  # micro-batches for each device


def given_microbatches(problem: PlanningProblem) -> int:
    """Micro-batches of a step, over all replicas, for planners whose papers take their size as given.

    Their papers' are mini-batches, and a step of the runner has several: here the fewest of equal size that are at
    least four for each device.
    """
    return next(each for each in divisors(problem.batch) if each >= min(_FOR_EACH * problem.ranks, problem.batch))


def divisors(number: int) -> list[int]:
    """All numbers that divide it, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def with_microbatches(
    problem: PlanningProblem, plan: Callable[[PlanningProblem, int], PlanningAnswer | None]
) -> PlanningAnswer | None:
    """The answer with the given micro-batches; where nothing fits, with the fewest more with which something does.

    Args:
        problem: the problem.
        plan: plans with so many micro-batches of a step, over all replicas.
    """
    least = given_microbatches(problem)
    answers = (plan(problem, count) for count in divisors(problem.batch) if count >= least)
    return next((each for each in answers if each is not None), None)


def ways_of(problem: PlanningProblem) -> tuple[int, int]:
    """The places of the ways to keep everything and to run everything again; the only one twice if others are asked."""
    names = [kept.name for kept in problem.divisions[0].kept]
    return (names.index("none") if "none" in names else 0), (names.index("full") if "full" in names else 0)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``."""
    return [1 << each for each in range(most.bit_length()) if 1 << each <= most]


def even_cut(layers: int, stages: int, *, last_more: bool = False) -> Stages:
    """Stages with as many layers as possible alike; ``last_more``: the last stages have the extra ones."""
    size, more = divmod(layers, stages)
    sizes = [size + (stage >= stages - more if last_more else stage < more) for stage in range(stages)]
    ends = list(accumulate(sizes))
    return tuple((end - size, end - 1) for size, end in zip(sizes, ends, strict=True))


_SHARED = "its stages have more replicas than a step has samples, and each would wait for a micro-batch of its own"
_DIVIDED = "its stages are divided differently, and the engine divides all layers among as many ranks"


def answer_of(
    planner: str,
    problem: PlanningProblem,
    stages: Stages,
    *,
    replicas: tuple[int, ...],
    tensor: tuple[int, ...],
    microbatches: int,
    kept: tuple[str, ...],
    seconds: float,
    peak_bytes: float | None = None,
    order: Order | None = None,
    again: tuple[int, ...] | None = None,
    offload: str | None = None,
    needs: tuple[str, ...] = (),
    count: int | None = None,
    devices: tuple[str, ...] = (),
    shares: tuple[int, ...] = (),
) -> PlanningAnswer:
    """The answer with these stages, and what the engine lacks for it.

    Args:
        planner: its name.
        problem: the problem.
        stages: first and last layer of each stage.
        replicas, tensor: for each stage its replicas, and the ranks that divide each of them.
        microbatches: the micro-batches of a step and replica, where stages have equal numbers of replicas. Otherwise
            the pipeline has as many replicas as their common divisor, and beyond that those of a stage take turns.
        count: micro-batches of a step over all replicas; None: as many as those of a stage have. Where numbers of
            replicas differ, it is at most the samples.
        shares: the share of each micro-batch in a replica's samples; empty: all have as many.
        kept: the name of each stage's way to keep.
        seconds, peak_bytes: what the planner's own model says of a step and of the fullest rank.
        order: the schedule; None: 1f1b.
        again: the layers that run forward again, where it is chosen by layer.
        offload: the strategy that moves what layers save.
        needs: what else the engine lacks for it.
        devices: the class of each stage's device, where they are unlike.
    """
    plain = next((each for each in problem.orders if each.schedule == "1f1b"), None)
    lacks = [*needs, *([_DIVIDED] if len(set(tensor)) > 1 else [])]
    data, ranks = max(replicas), len(stages)
    if len(set(replicas)) > 1:
        total = max(min(count or microbatches * data, problem.batch), max(replicas))
        data = math.gcd(*replicas, total, problem.batch)
        ranks, microbatches = sum(replicas) // data, total // data
        if total > problem.batch:
            lacks.append(_SHARED)
    return PlanningAnswer(
        planner,
        ranks,
        data,
        max(tensor),
        microbatches,
        (order or plain) if len(stages) > 1 else None,
        stages,
        kept,
        None,
        seconds,
        peak_bytes,
        tuple(lacks),
        replicas,
        again,
        offload,
        devices,
        shares,
    )
