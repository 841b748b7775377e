"""A lower bound of the time of a flushed step that holds for every order of its actions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Schedule

__all__ = ["lower_bound"]


def lower_bound(schedule: Schedule, costs: StageCosts, limit: float | None = None, *, recompute: bool = False) -> float:
    """The least time, in the unit of the costs, of any order of this schedule's stages and micro-batches.

    It is the largest of three times of each rank. First, a rank cannot begin before the first micro-batch has reached
    it, and then works without pause at best. Second, in one pipeline, a rank can run only forwards until the first
    micro-batch comes back, and not more of them than it may keep. Third, a rank keeps activations of each micro-batch
    until it has been at the last stage and come back, and may keep only ``limit`` micro-batches at a time.

    Args:
        schedule: its placement and the pipeline of each micro-batch are used; its order is not.
        costs: durations of each stage, and of messages.
        limit: number of micro-batches, in units of a rank's whole share, that a rank may keep between F and B or W;
            None means any number.
        recompute: if True, bound the orders that keep only the activations of the last stage and run every other
            forward twice.
    """
    ways = [_Way(row, costs) for row in schedule.placement]
    counts = Counter(schedule.pipeline_of_microbatch)
    again = [cost if recompute else 0.0 for cost in costs.F[:-1]] + [0.0]
    least = 0.0
    for rank in range(schedule.ranks):
        held = [(way, counts[number], way.stages_of(rank)) for number, way in enumerate(ways)]
        begin = min(way.arrival[stage] for way, count, stages in held for stage in stages if count)
        work = sum(
            count * (costs.F[stage] + again[stage] + _cheapest_backward(costs, stage))
            for _, count, stages in held
            for stage in stages
        )
        least = max(least, begin + work)
        if len(ways) == 1 and not recompute:
            way, count, stages = held[0]
            room = math.inf if limit is None else limit * schedule.chunks
            forwards = min(count * sum(costs.F[stage] for stage in stages), room * max(costs.F[s] for s in stages))
            least = max(least, way.comes_back(max(stages)) + work - forwards)
            least = max(least, begin + count * sum(map(way.kept, stages)) / room)
    return least


class _Way:
    """The times of one micro-batch alone on its way through the stages, with the shorter of B and I.

    Attributes:
        arrival: for each stage, the moment when the first micro-batch reaches it.
    """

    def __init__(self, placement: Sequence[int], costs: StageCosts) -> None:
        self._placement, self._costs = placement, costs
        edges = zip(itertools.pairwise(placement), costs.comm or [0.0] * (len(placement) - 1), strict=True)
        self._hops = [0.0 if one == other else cost for (one, other), cost in edges]
        self._back = [min(pair) for pair in zip(costs.I or costs.B, costs.B, strict=True)]
        self.arrival = [0.0, *itertools.accumulate(f + hop for f, hop in zip(costs.F, self._hops, strict=False))]

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage, owner in enumerate(self._placement) if owner == rank]

    def comes_back(self, stage: int) -> float:
        """The moment when the gradient of the first micro-batch reaches ``stage``."""
        back = sum(self._back[stage + 1 :]) + sum(self._hops[stage:])
        return self.arrival[-1] + self._costs.F[-1] + back

    def kept(self, stage: int) -> float:
        """The least time for which ``stage`` keeps activations of a micro-batch."""
        after = _cheapest_backward(self._costs, stage) - self._back[stage]
        return self.comes_back(stage) - self.arrival[stage] + self._back[stage] + after


def _cheapest_backward(costs: StageCosts, stage: int) -> float:
    split = costs.I[stage] + costs.W[stage] if costs.I else costs.B[stage]
    return min(costs.B[stage], split)
