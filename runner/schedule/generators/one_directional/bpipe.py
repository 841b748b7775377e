"""BPipe: 1F1B in which the first ranks, which keep most, lend micro-batches to the last ranks, which keep least.

Source: Kim et al., BPipe, 2023. Rank x of the first half is paired with rank D-1-x. The order of compute is 1F1B's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.schedule.catalogue.kinds import Legal, ScheduleSpec
from runner.schedule.generators.forms import flushed
from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b
from runner.schedule.values import Action, Op, Schedule

__all__ = ["SPEC", "bpipe", "most_kept"]


def most_kept(ranks: int) -> int:
    """The most micro-batches that a rank keeps: half of the D + 1 that 1F1B keeps on both ranks of a pair."""
    return ranks // 2 + 1


def bpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate BPipe.

    Args:
        ranks: D, even.
        microbatches: any number.
    """
    order = one_f_one_b(ranks, microbatches)
    lending = [
        tuple(_with_moves(row, host=ranks - 1 - rank, most=most_kept(ranks)))
        for rank, row in enumerate(order.actions[: ranks // 2])
    ]
    return replace(order, name="bpipe", actions=(*lending, *order.actions[ranks // 2 :]))


def _with_moves(row: Sequence[Action], *, host: int, most: int) -> Iterator[Action]:
    """Add moves to a lender's list: if room is short, the youngest micro-batch leaves until an action before its B."""
    kept: list[int] = []
    away: set[int] = set()
    for index, action in enumerate(row):
        soon = {each.microbatch for each in row[index : index + 2] if each.op is Op.B}
        coming = [microbatch for microbatch in away if microbatch in soon]
        room = most - len(coming) - (action.op is Op.F)
        while len(kept) > room:
            youngest = max(microbatch for microbatch in kept if microbatch not in soon)
            kept.remove(youngest)
            away.add(youngest)
            yield Action(Op.OUT, action.stage, youngest, peer=host)
        for microbatch in coming:
            kept.append(microbatch)
            away.remove(microbatch)
            yield Action(Op.IN, action.stage, microbatch, peer=host)
        yield action
        assert action.microbatch is not None  # every compute action has one
        if action.op is Op.F:
            kept.append(action.microbatch)
        else:
            kept.remove(action.microbatch)


SPEC = ScheduleSpec(
    name="bpipe",
    position=160,
    description="1f1b whose first ranks lend micro-batches to the last ones: half of the peak, for messages",
    summary="`1f1b` whose first ranks lend activations to the last",
    source="Kim et al., BPipe, 2023",
    formulas=flushed("min(D // 2 + 1, D - r) if r < D // 2 else D // 2", when="T >= D"),
    generate=lambda request: bpipe(request.ranks, request.microbatches),
    ranks=Legal("even", lambda _, ranks: ranks % 2 == 0),
)
