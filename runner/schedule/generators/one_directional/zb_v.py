"""ZB-V: zero bubble in a V of two chunks per rank, with 1F1B's memory on every rank.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2024; the order is that of torch's ScheduleZBVZeroBubble.
"""

from __future__ import annotations

from runner.schedule.generators.forms import EQUAL, TWO_CHUNKS, zero_bubble
from runner.schedule.generators.layout import of_one_pipeline, zigzag
from runner.schedule.generators.one_directional.v_row import VRow
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "zb_v"]

_F0, _F1, _I0, _I1 = (Op.F, 0), (Op.F, 1), (Op.I, 0), (Op.I, 1)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Generate ZB-V. For fewer than 2 D - 1 micro-batches: the order of 2 D - 1 without those that do not exist."""
    rows = [_row(ranks, rank, max(microbatches, 2 * ranks - 1)) for rank in range(ranks)]
    kept = [[action for action in row if (action.microbatch or 0) < microbatches] for row in rows]
    return of_one_pipeline("zb_v", zigzag(ranks, 2), kept, microbatches)


def _row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    row = VRow((rank, 2 * ranks - 1 - rank))
    behind = ranks - rank  # number of ranks from this one to the turn, both included
    row.add(*[_F0] * (2 * behind - 1))
    row.add(*[_F1, _F0] * rank)
    for _ in range(behind):
        row.add(_F1, _I1)
        row.pay(1)
    while row.count(*_F1) < max(row.count(*_F0), microbatches):
        if row.count(*_F0) < microbatches:
            row.add(_F0)
        row.add(_I0)
        row.pay(0)
        row.add(_F1, _I1)
        row.pay(1)
    row.add(*[_I0, _I1] * rank)
    for _ in range(behind):
        row.add(_I0)
        row.pay(0)
    row.pay_all(1)
    row.pay_all(0)
    return row.actions


SPEC = ScheduleSpec(
    name="zb_v",
    position=100,
    description="zero bubble in a V of two chunks per rank; 1f1b's memory on every rank",
    summary="two stages per rank, down and up; 0 idle with `schedule.post_validation`",
    source="Qi et al., Zero Bubble Pipeline Parallelism, 2024; torch's ScheduleZBVZeroBubble",
    formulas=zero_bubble("(D - 1) * F / 2", "D", "0", f"T >= 2 * D - 1 and {EQUAL}"),
    generate=lambda request: zb_v(request.ranks, request.microbatches),
    default_chunks=2,
    chunks=TWO_CHUNKS,
)
