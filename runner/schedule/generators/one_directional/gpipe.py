"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe, 2019. Backwards run in the order of the forwards, so that gradients are summed in the same
order as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.forms import SHARES, flushed
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.one_directional.naive import naive
from runner.schedule.generators.replicated import REPLICAS, replicated, replicated_problems
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "gpipe"]


def gpipe(
    ranks: int, microbatches: int, replicas: Sequence[int] | None = None, shares: Sequence[float] | None = None
) -> Schedule:
    """Generate F of every micro-batch, then B of every micro-batch. On one rank this is gradient accumulation.

    Args:
        ranks, microbatches: D and T.
        replicas, shares: see :class:`~runner.schedule.kinds.ScheduleRequest`.
    """
    if replicas is not None and max(replicas) > 1:
        return replicated("gpipe", replicas, microbatches, lambda forwards, backwards, _: [*forwards, *backwards])
    if ranks == 1:
        return naive(ranks, microbatches, name="gpipe", shares=shares)
    order = range(microbatches)
    rows = [[forward(rank, m) for m in order] + [backward(rank, m) for m in order] for rank in range(ranks)]
    return of_one_pipeline("gpipe", looping(ranks, 1), rows, microbatches, shares)


def _generate(request: ScheduleRequest) -> Schedule:
    return gpipe(request.ranks, request.microbatches, request.option("replicas"), request.option("shares"))


SPEC = ScheduleSpec(
    name="gpipe",
    position=20,
    description="all forwards, then all backwards",
    summary="all forwards, then all backwards",
    source="Huang et al., GPipe, 2019",
    formulas=flushed("T"),
    generate=_generate,
    constraint=replicated_problems,
    options=(REPLICAS, SHARES),
    one_rank=True,
)
