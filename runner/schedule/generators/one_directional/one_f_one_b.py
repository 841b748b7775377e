"""1F1B with a flush: a warm-up of forwards, then one forward and one backward in turn.

Sources: Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021; for the eager warm-up: Zheng et al., Alpa,
2022, "overlap friendly", which is DAPPLE's policy B. Any number of micro-batches is possible, even fewer than ranks.

Micro-batches may differ in size: those that are smaller count as their part of the largest, in the warm-up and in what
a rank keeps. If the first ones are halves, the pipeline fills in half the time, and no rank keeps more than with equal
ones (Liu et al., AutoPipe, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.forms import SHARES, flushed
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.placed import PLACEMENT, STARTS, placed, placed_problems
from runner.schedule.generators.replicated import REPLICAS, replicated, replicated_problems
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.values import Action, Schedule

__all__ = ["SPECS", "in_turn", "one_f_one_b", "one_f_one_b_eager"]

_ROUNDING = 1e-9  # of sums of sizes


def one_f_one_b(
    ranks: int, microbatches: int, replicas: Sequence[int] | None = None, shares: Sequence[float] | None = None
) -> Schedule:
    """Generate 1F1B with as many forwards ahead as ranks follow. On one rank this is gradient accumulation.

    Args:
        ranks, microbatches: D and T.
        replicas, shares: see :class:`~runner.schedule.kinds.ScheduleRequest`.
    """
    if replicas is not None and max(replicas) > 1:
        return replicated("1f1b", replicas, microbatches, in_turn)
    return _generic("1f1b", [ranks - 1 - rank for rank in range(ranks)], microbatches, shares)


def one_f_one_b_eager(ranks: int, microbatches: int, shares: Sequence[float] | None = None) -> Schedule:
    """Generate 1F1B with twice as many forwards ahead, so that a message has a whole slot of time to arrive."""
    return _generic("1f1b_eager", [2 * (ranks - 1 - rank) for rank in range(ranks)], microbatches, shares)


def _generic(name: str, warm_up: Sequence[int], microbatches: int, shares: Sequence[float] | None) -> Schedule:
    order = range(microbatches)
    rows = [
        in_turn([forward(rank, m) for m in order], [backward(rank, m) for m in order], ahead, shares)
        for rank, ahead in enumerate(warm_up)
    ]
    return of_one_pipeline(name, looping(len(rows), 1), rows, microbatches, shares)


def in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int, sizes: Sequence[float] | None = None
) -> list[Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards.

    Args:
        forwards, backwards: all that the rank runs, in the order of the micro-batches.
        ahead: the number of forwards of the largest size.
        sizes: the size of each micro-batch; None: all are alike. With fewer samples, more forwards are ahead, and a
            forward that would exceed ``ahead`` + 1 of the largest waits for another backward.
    """
    parts = [1.0] * len(forwards) if sizes is None else [each / max(sizes) for each in sizes]
    row, held, taken = list[Action](), 0.0, 0
    while taken < len(forwards) and held < ahead - _ROUNDING:
        row.append(forwards[taken])
        held, taken = held + parts[taken], taken + 1
    for part, each in zip(parts, backwards, strict=True):
        if taken < len(forwards) and held + parts[taken] <= ahead + 1 + _ROUNDING:
            row.append(forwards[taken])
            held, taken = held + parts[taken], taken + 1
        row.append(each)
        held -= part
    return row


def _generate(request: ScheduleRequest) -> Schedule:
    if (placement := request.option("placement")) is not None:
        return placed("1f1b", placement, request.microbatches, request.option("starts"))
    return one_f_one_b(request.ranks, request.microbatches, request.option("replicas"), request.option("shares"))


SPECS = (
    ScheduleSpec(
        name="1f1b",
        position=30,
        description="one forward, one backward after a short warm-up: gpipe's time with fewer activations",
        summary="one forward, one backward in turn",
        source="Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021",
        formulas=flushed("min(T, D - r)"),
        generate=_generate,
        constraint=lambda request: [*replicated_problems(request), *placed_problems(request)],
        options=(REPLICAS, SHARES, PLACEMENT, STARTS),
        one_rank=True,
    ),
    ScheduleSpec(
        name="1f1b_eager",
        position=40,
        description="1f1b with twice the warm-up, which hides the time of messages",
        summary="more forwards ahead, which hide messages",
        source="Zheng et al., Alpa, 2022; Fan et al., DAPPLE, 2021, policy B",
        formulas=flushed("min(T, 2 * (D - 1 - r) + 1)"),
        generate=lambda request: one_f_one_b_eager(request.ranks, request.microbatches, request.option("shares")),
        options=(SHARES,),
    ),
)
