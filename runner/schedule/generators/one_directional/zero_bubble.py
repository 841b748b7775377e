"""ZB-H1 and ZB-H2: weight gradients fill the bubble of a pipeline with one stage per rank.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024. A rank that starts late delays its weight gradients, so that
it computes the input gradients, for which others wait, first.
"""

from __future__ import annotations

from runner.schedule.generators.forms import zero_bubble
from runner.schedule.generators.layout import (
    forward,
    input_gradient,
    looping,
    of_one_pipeline,
    weight_gradient,
)
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Action, Schedule

__all__ = ["SPECS", "zb_h1", "zb_h2"]


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Generate ZB-H1, with 1F1B's memory and a third of its bubble: rank r delays W by r micro-batches."""
    rows = [_row(rank, microbatches, ranks - rank, rank) for rank in range(ranks)]
    return of_one_pipeline("zb_h1", looping(ranks, 1), rows, microbatches)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Generate ZB-H2, without idle time inside a rank's step, for about twice 1F1B's memory: rank r delays W by 2r.

    The time that a rank gains at its end is used only if the next step's forwards begin in it.

    Args:
        ranks: D.
        microbatches: T, at least 2 D - 1.
    """
    rows = [_row(rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)]
    return of_one_pipeline("zb_h2", looping(ranks, 1), rows, microbatches)


def _row(rank: int, microbatches: int, ahead: int, owed: int) -> list[Action]:
    """The order of a rank: ``ahead`` forwards, then I, W and F in turn; W is ``owed`` micro-batches later than I."""
    row = [forward(rank, m) for m in range(min(ahead, microbatches))]
    for m in range(microbatches):
        row.append(input_gradient(rank, m))
        if m >= owed:
            row.append(weight_gradient(rank, m - owed))
        if m + ahead < microbatches:
            row.append(forward(rank, m + ahead))
    return row + [weight_gradient(rank, m) for m in range(max(0, microbatches - owed), microbatches)]


SPECS = (
    ScheduleSpec(
        name="zb_h1",
        position=70,
        description="weight gradients fill the bubble; 1f1b's memory",
        summary="gradients of weights, computed apart, fill the bubble",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024; torch's ScheduleInterleavedZeroBubble of one stage",
        formulas=zero_bubble("(D - 1) * (F + I - W)", "D", "(D - 1) * (F + I - W)", "T >= D and W <= F and W <= I"),
        generate=lambda request: zb_h1(request.ranks, request.microbatches),
    ),
    ScheduleSpec(
        name="zb_h2",
        position=80,
        description="no idle time inside a step for twice the memory; pays off where steps run into each other",
        summary="`zb_h1` with more forwards ahead: 0 idle with `schedule.post_validation`",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024",
        formulas=zero_bubble("(D - 1) * F", "2 * D - 1", "(D - 1) * (F + I - 2 * W)", "W <= F and W <= I"),
        generate=lambda request: zb_h2(request.ranks, request.microbatches),
        microbatches=Legal("at least 2 D - 1", lambda ranks, microbatches: microbatches >= 2 * ranks - 1),
    ),
)
