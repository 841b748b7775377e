"""DualPipeV: one half of DualPipe, a V of two chunks per rank with one copy of the weights.

Source: DeepSeek-AI, DualPipe, 2025, ``DualPipeV``; torch's ScheduleDualPipeV has the same order. DualPipe computes
pairs of a forward and a backward together, so that the messages of one overlap with the compute of the other; here they
come one after the other.
"""

from __future__ import annotations

from runner.schedule.generators.forms import EQUAL, TWO_CHUNKS, zero_bubble
from runner.schedule.generators.layout import of_one_pipeline, zigzag
from runner.schedule.generators.one_directional.v_row import VRow
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.values import Op, Schedule

__all__ = ["SPEC", "dualpipe_v", "fill_dual_row"]

_F0, _F1, _B0, _B1, _I0, _I1 = (Op.F, 0), (Op.F, 1), (Op.B, 0), (Op.B, 1), (Op.I, 0), (Op.I, 1)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Generate DualPipeV.

    Args:
        ranks: D.
        microbatches: T, at least 2 D.
    """
    rows = [
        fill_dual_row(VRow((rank, 2 * ranks - 1 - rank)), ranks, rank, microbatches).actions for rank in range(ranks)
    ]
    return of_one_pipeline("dualpipe_v", zigzag(ranks, 2), rows, microbatches)


def fill_dual_row(row: VRow, ranks: int, rank: int, microbatches: int) -> VRow:
    """Fill the list of one rank.

    Args:
        row: an empty list.
        ranks, rank: D and r, counted from the end where micro-batches of chunk 0 enter to the turn or the middle.
        microbatches: number of micro-batches of each chunk.
    """
    here, behind = rank + 1, ranks - rank - 1
    row.add(*[_F0] * (2 * behind), *[_F0, _F1] * here)
    for _ in range(behind):
        row.add(_I1)
        row.pay()
        row.add(_F1)
    row.add(*[_F0, _B1, _F1, _B0] * (microbatches - 2 * ranks + here))
    row.add(*[_B1, _F1, _B0] * behind)
    row.add(*_drain(here))
    for _ in range(behind):
        row.pay()
        row.add(_I0)
    for _ in range(here):
        row.pay()
    return row


def _drain(pairs: int) -> list[tuple[Op, int]]:
    """Backwards of both chunks in turn; in the second half, weight gradients are delayed."""
    return ([_B1, _B0] * pairs)[:pairs] + ([_I1, _I0] * pairs)[pairs:]


SPEC = ScheduleSpec(
    name="dualpipe_v",
    position=130,
    description="DualPipe in a V: one copy of the weights; its pairs of F and B one after the other",
    summary="DualPipe's order in a V",
    source="DeepSeek-AI, DualPipe, 2025; torch's ScheduleDualPipeV",
    formulas=zero_bubble("(D - 1) * F / 2", "D + 0.5", "(D - 1) * F / 2", EQUAL),
    generate=lambda request: dualpipe_v(request.ranks, request.microbatches),
    default_chunks=2,
    chunks=TWO_CHUNKS,
    microbatches=Legal("at least 2 D", lambda ranks, microbatches: microbatches >= 2 * ranks),
)
