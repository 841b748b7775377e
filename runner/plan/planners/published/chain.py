"""What all published planners read: sums over ranges of layers in one setting, and the numbers they may choose from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from runner.plan.planners.values import Division, PlanningAnswer, PlanningProblem

__all__ = ["Chain", "answer_of", "divisors", "even_cut", "least_slowest", "powers_of_two"]

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
            "saved": [self.samples * each for each in kept.saved],
        }
        return {name: list(accumulate(values, initial=0.0)) for name, values in of.items()}

    def total(self, name: str, first: int, end: int) -> float:
        """The sum of ``forward``, ``backward``, ``weight``, ``gradient``, ``state`` or ``saved`` over a range."""
        sums = self._sums[name]
        return sums[end] - sums[first]

    def seconds(self, first: int, end: int) -> float:
        """Seconds of a forward and a backward."""
        return self.total("forward", first, end) + self.total("backward", first, end)

    def held(self, first: int, end: int) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return sum(self.total(name, first, end) for name in ("weight", "gradient", "state"))

    def working(self) -> float:
        """The most bytes of a layer beside what it saves."""
        return self.samples * max(self.division.kept[self.kept].working)

    def message(self, end: int) -> float:
        """Seconds of the message after the layers before ``end``; 0 after the last."""
        size = self.samples * self.division.boundary[end - 1]
        return self.problem.link.seconds(size)

    def peak(self, first: int, end: int, in_flight: int) -> float:
        """Bytes of a stage with so many micro-batches in flight."""
        return self.held(first, end) + in_flight * self.total("saved", first, end) + self.working()

    def sum_seconds(self, first: int, end: int, replicas: int) -> float:
        """Seconds of the sum of a range's gradients over replicas, in a ring."""
        size = self.total("gradient", first, end)
        return 2 * (replicas - 1) * self.problem.link.seconds(size / replicas) if replicas > 1 else 0.0


def least_slowest(
    chain: Chain, devices: int, stage_seconds: Callable[[int, int, int], float]
) -> tuple[float, Stages, tuple[int, ...]]:
    """The least slowest stage or message on exactly so many devices, with the stages and the replicas of each.

    Args:
        chain: the layers.
        devices: the number of devices.
        stage_seconds: seconds of a stage, by its first layer, its end and its replicas.
    """

    @cache
    def best(end: int, left: int) -> tuple[float, Stages, tuple[int, ...]]:
        found: tuple[float, Stages, tuple[int, ...]] = stage_seconds(0, end, left), ((0, end - 1),), (left,)
        for cut in range(1, end):
            for own in range(1, left):
                before, stages, replicas = best(cut, left - own)
                worst = max(before, 2 * chain.message(cut), stage_seconds(cut, end, own))
                if worst < found[0]:
                    found = worst, (*stages, (cut, end - 1)), (*replicas, own)
        return found

    return best(len(chain.problem.layers), devices)


def divisors(number: int) -> list[int]:
    """All numbers that divide it, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, … up to ``most``."""
    return [1 << each for each in range(most.bit_length()) if 1 << each <= most]


def even_cut(layers: int, stages: int, *, last_more: bool = False) -> Stages:
    """Stages with as many layers as possible alike; ``last_more``: the last stages have the extra ones."""
    size, more = divmod(layers, stages)
    sizes = [size + (stage >= stages - more if last_more else stage < more) for stage in range(stages)]
    ends = list(accumulate(sizes))
    return tuple((end - size, end - 1) for size, end in zip(sizes, ends, strict=True))


_SHARED = "its stages have different numbers of replicas, and the engine gives each stage as many"
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
) -> PlanningAnswer:
    """The answer with these stages, and what the engine lacks for it.

    Args:
        planner: its name.
        problem: the problem.
        stages: first and last layer of each stage.
        replicas, tensor: for each stage its replicas, and the ranks that divide each of them.
        microbatches: the micro-batches of a step and replica.
        kept: the name of each stage's way to keep.
        seconds, peak_bytes: what the planner's own model says of a step and of the fullest rank.
    """
    needs = [*([_SHARED] if len(set(replicas)) > 1 else []), *([_DIVIDED] if len(set(tensor)) > 1 else [])]
    return PlanningAnswer(
        planner,
        len(stages),
        max(replicas),
        max(tensor),
        microbatches,
        next((each for each in problem.orders if each.schedule == "1f1b"), None) if len(stages) > 1 else None,
        stages,
        kept,
        None,
        seconds,
        peak_bytes,
        tuple(needs),
        replicas,
    )
