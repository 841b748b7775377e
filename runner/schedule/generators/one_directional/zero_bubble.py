"""ZB-H1 and ZB-H2: weight gradients fill the bubble that a pipeline of one stage per rank leaves.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024. A rank that starts late owes weight gradients, so that it
computes input gradients, which others wait for, first.
"""

from __future__ import annotations

from runner.schedule.generators.layout import (
    forward,
    input_gradient,
    looping,
    of_one_pipeline,
    weight_gradient,
)
from runner.schedule.values import Action, Schedule

__all__ = ["zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B's memory and a third of its bubble: rank r owes r weight gradients."""
    rows = [_row(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]
    return of_one_pipeline("zb_h1", looping(ranks, 1), rows, microbatches)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No idle time between a rank's first and last action, for about twice 1F1B's memory: rank r owes 2r.

    The time gained at a rank's end is used only if the next step's forwards run into it.

    Args:
        ranks: D.
        microbatches: at least 2 D - 1.
    """
    rows = [_row(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)]
    return of_one_pipeline("zb_h2", looping(ranks, 1), rows, microbatches)


def _row(rank: int, microbatches: int, ahead: int, owed: int) -> list[Action]:
    """``ahead`` forwards, then I, W and F in turn; W stays ``owed`` micro-batches behind I until the end."""
    row = [forward(rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        row.append(input_gradient(rank, m))
        if m >= owed:
            row.append(weight_gradient(rank, m - owed))
        if m + ahead < microbatches:
            row.append(forward(rank, m + ahead))
    return row + [weight_gradient(rank, m) for m in range(max(0, microbatches - owed), microbatches)]
