"""How short a flushed step can be at all, whatever the order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from runner.schedule.simulate import StageCosts

__all__ = ["lower_bound"]


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: StageCosts,
    limit: float | None = None,
    *,
    recompute: bool = False,
) -> float:
    """A time below which no order of these stages ends, in the unit of the costs.

    The largest of three times of each rank. It cannot begin before the first micro-batch has come to it, and works
    without pause at best. Until the first micro-batch comes back it has forwards alone to do, and no more than it may
    keep. And what it keeps of a micro-batch stays until that has been at the last stage and back; all of this has to
    go into ``limit`` times the time that the rank has.

    Args:
        placement: stage -> rank, as many stages on each.
        microbatches: T.
        costs: durations per stage, and of messages.
        limit: micro-batches of its whole share that a rank may keep between F and B or W; None: any number.
        recompute: of orders that keep no activations but the last stage's, and run every other forward twice.
    """
    chunks = len(placement) // (max(placement) + 1)
    edges = zip(itertools.pairwise(placement), _hop_costs(costs), strict=True)
    hops = [0.0 if one == other else cost for (one, other), cost in edges]
    arrival = [0.0, *itertools.accumulate(f + hop for f, hop in zip(costs.F, hops, strict=False))]
    there = _sums_from([*costs.F], hops)
    back = _sums_from([*_cheapest_input_gradients(costs)], hops)
    least = 0.0
    for rank in set(placement):
        stages = [stage for stage, owner in enumerate(placement) if owner == rank]
        begin = min(arrival[stage] for stage in stages)
        work = sum(costs.F[stage] + _cheapest_backward(costs, stage) for stage in stages)
        again = sum(costs.F[stage] for stage in stages if recompute and stage != len(placement) - 1)
        least = max(least, begin + microbatches * (work + again))
        if recompute:
            continue
        forwards = microbatches * sum(costs.F[stage] for stage in stages)
        if limit is not None:
            forwards = min(forwards, limit * chunks * max(costs.F[stage] for stage in stages))
        comes_back = arrival[-1] + _way_back(costs, hops, max(stages))
        least = max(least, comes_back + microbatches * work - forwards)
        if limit is not None:
            kept = sum(there[stage] + back[stage] + _trailing_weight(costs, stage) for stage in stages)
            least = max(least, begin + microbatches * kept / (limit * chunks))
    return least


def _way_back(costs: StageCosts, hops: Sequence[float], stage: int) -> float:
    """From the beginning of the last stage's forward until the gradient of the same micro-batch comes to ``stage``."""
    return costs.F[-1] + sum(_cheapest_input_gradients(costs)[stage + 1 :]) + sum(hops[stage:])


def _hop_costs(costs: StageCosts) -> Sequence[float]:
    return costs.comm or (0.0,) * (len(costs.F) - 1)


def _cheapest_backward(costs: StageCosts, stage: int) -> float:
    split = costs.I[stage] + costs.W[stage] if costs.I else costs.B[stage]
    return min(costs.B[stage], split)


def _cheapest_input_gradients(costs: StageCosts) -> list[float]:
    return [min(pair) for pair in zip(costs.I or costs.B, costs.B, strict=True)]


def _trailing_weight(costs: StageCosts, stage: int) -> float:
    """What comes after the gradient of the stage's input, before its activation is free."""
    return _cheapest_backward(costs, stage) - _cheapest_input_gradients(costs)[stage]


def _sums_from(durations: Sequence[float], hops: Sequence[float]) -> list[float]:
    """Per stage: it and all later ones, with the messages between them."""
    reached = 0.0
    sums = []
    for duration, hop in zip(reversed(durations), [0.0, *reversed(hops)], strict=True):
        reached += duration + hop
        sums.append(reached)
    return sums[::-1]
