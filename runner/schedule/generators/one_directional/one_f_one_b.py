"""1F1B with a flush: a warm-up of forwards, then one forward and one backward in turn.

Sources: Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021; for the eager warm-up: Zheng et al., Alpa,
2022, "overlap friendly", which is DAPPLE's policy B. Any number of micro-batches is possible, even fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.catalogue.kinds import ScheduleSpec
from runner.schedule.generators.forms import flushed
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.generators.replicated import KEYS, replicated, replicated_problems
from runner.schedule.values import Action, Schedule

__all__ = ["SPECS", "in_turn", "one_f_one_b", "one_f_one_b_eager"]


def one_f_one_b(ranks: int, microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """Generate 1F1B with as many forwards ahead as ranks follow. On one rank this is gradient accumulation.

    Args:
        ranks, microbatches: D and T.
        replicas: see :class:`~runner.schedule.catalogue.kinds.ScheduleRequest`.
    """
    if replicas is not None and max(replicas) > 1:
        return replicated("1f1b", replicas, microbatches, in_turn)
    return _generic("1f1b", [ranks - 1 - rank for rank in range(ranks)], microbatches)


def one_f_one_b_eager(ranks: int, microbatches: int) -> Schedule:
    """Generate 1F1B with twice as many forwards ahead, so that a message has a whole slot of time to arrive."""
    return _generic("1f1b_eager", [2 * (ranks - 1 - rank) for rank in range(ranks)], microbatches)


def _generic(name: str, warm_up: Sequence[int], microbatches: int) -> Schedule:
    order = range(microbatches)
    rows = [
        in_turn([forward(rank, m) for m in order], [backward(rank, m) for m in order], ahead)
        for rank, ahead in enumerate(warm_up)
    ]
    return of_one_pipeline(name, looping(len(rows), 1), rows, microbatches)


def in_turn(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """``ahead`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    row = list(forwards[:ahead])
    steady = forwards[ahead:]
    for pair in zip(steady, backwards, strict=False):
        row += pair
    return row + list(backwards[len(steady) :])


SPECS = (
    ScheduleSpec(
        name="1f1b",
        position=30,
        description="one forward, one backward after a short warm-up: gpipe's time with fewer activations",
        summary="one forward, one backward in turn",
        source="Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021",
        formulas=flushed("min(T, D - r)"),
        generate=lambda request: one_f_one_b(request.ranks, request.microbatches, request.replicas),
        constraint=replicated_problems,
        keys=KEYS,
        one_rank=True,
    ),
    ScheduleSpec(
        name="1f1b_eager",
        position=40,
        description="1f1b with twice the warm-up, which hides the time of messages",
        summary="more forwards ahead, which hide messages",
        source="Zheng et al., Alpa, 2022; Fan et al., DAPPLE, 2021, policy B",
        formulas=flushed("min(T, 2 * (D - 1 - r) + 1)"),
        generate=lambda request: one_f_one_b_eager(request.ranks, request.microbatches),
    ),
)
