"""V-Half and V-Min: a block that is repeated every six slots fixes how long a rank keeps an activation.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, 2024, and its published offsets. A block is one
micro-batch on one rank: F of the first and of the second chunk, I of the second and of the first, and two W. The W take
the free slots, oldest first. Only the order of the actions is used, without the gaps.
"""

from __future__ import annotations

from collections import deque

from runner.schedule.generators.forms import EQUAL, TWO_CHUNKS, zero_bubble
from runner.schedule.generators.layout import forward, input_gradient, of_one_pipeline, zigzag
from runner.schedule.kinds import ScheduleSpec
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPECS", "v_half", "v_min"]

_PERIOD = 6  # number of slots of one micro-batch on one rank: F, I and W of two chunks


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Generate V-Half, which keeps about half of 1F1B's activations."""
    shift = 0 if ranks % 2 else 3

    def slots(r: int) -> tuple[int, int, int, int]:
        return 2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + shift + 2 * r, 6 * ranks + shift - 2 - r

    rows = [_row(ranks, rank, slots(rank), microbatches) for rank in range(ranks)]
    return of_one_pipeline("v_half", zigzag(ranks, 2), rows, microbatches)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Generate V-Min, which keeps about a third of 1F1B's activations, the least that is possible with a V."""
    shift = 0 if ranks % 3 else 2

    def slots(r: int) -> tuple[int, int, int, int]:
        return r, 2 * ranks - 1 - r, 2 * ranks + shift + r, 4 * ranks + shift - 1 - r

    rows = [_row(ranks, rank, slots(rank), microbatches) for rank in range(ranks)]
    return of_one_pipeline("v_min", zigzag(ranks, 2), rows, microbatches)


def _row(ranks: int, rank: int, slots: tuple[int, int, int, int], microbatches: int) -> list[Action]:
    """The order of one rank.

    Args:
        ranks, rank: D and r.
        slots: the slots of micro-batch 0 for F of chunk 0, F of chunk 1, I of chunk 1 and I of chunk 0.
        microbatches: T.
    """
    assert len({slot % _PERIOD for slot in slots}) == 4, "two actions of one rank in one slot"
    first, second = rank, 2 * ranks - 1 - rank
    cells = ((forward, first), (forward, second), (input_gradient, second), (input_gradient, first))
    taken = {
        slot + _PERIOD * m: make(stage, m)
        for slot, (make, stage) in zip(slots, cells, strict=True)
        for m in range(microbatches)
    }
    row: list[Action] = []
    owed: deque[Action] = deque()
    for slot in range(max(taken) + 1):
        if slot not in taken:
            if owed:
                row.append(owed.popleft())
            continue
        action = taken[slot]
        row.append(action)
        if action.op is Op.I:
            owed.append(action._replace(op=Op.W))
    return [*row, *owed]


_V_HALF_IDLE = "(7 * D - (7 if D % 2 else 4)) * F / 4"

_V_MIN_IDLE = "(4 * D - (5 if D % 3 else 3)) * F / 2"


SPECS = (
    ScheduleSpec(
        name="v_half",
        position=110,
        description="a V with half of 1f1b's activations and about its bubble",
        summary="half of `1f1b`'s memory as p grows",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024",
        formulas=zero_bubble(_V_HALF_IDLE, "D // 2 + 1", _V_HALF_IDLE, f"T > D and {EQUAL}"),
        generate=lambda request: v_half(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=TWO_CHUNKS,
    ),
    ScheduleSpec(
        name="v_min",
        position=120,
        description="a V with a third of 1f1b's activations, the least there is; suffers where F, I and W differ",
        summary="a third of `1f1b`'s memory as p grows",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024",
        formulas=zero_bubble(
            _V_MIN_IDLE, "(D + 4) // 3 - (D % 3 == 2 and r % 3 == 0)", _V_MIN_IDLE, f"T >= D and {EQUAL}"
        ),
        generate=lambda request: v_min(request.ranks, request.microbatches),
        default_chunks=2,
        chunks=TWO_CHUNKS,
    ),
)
