"""1F1B with a flush: as many forwards ahead as there are ranks behind, then one forward, one backward.

Source: Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021. Any number of micro-batches
will do, also fewer than ranks.
"""

from __future__ import annotations

from runner.schedule.generators.straight import backward, forward, straight
from runner.schedule.values import Action, Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B. On one rank: gradient accumulation."""
    return straight("1f1b", [_row(rank, ranks, microbatches) for rank in range(ranks)], microbatches)


def _row(rank: int, ranks: int, microbatches: int) -> list[Action]:
    warm_up = min(microbatches, ranks - 1 - rank)
    row = [forward(rank, m) for m in range(warm_up)]
    for done in range(microbatches - warm_up):
        row += [forward(rank, warm_up + done), backward(rank, done)]
    return row + [backward(rank, m) for m in range(microbatches - warm_up, microbatches)]
