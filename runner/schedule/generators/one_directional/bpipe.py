"""BPipe: 1F1B whose first ranks, which keep most, hand micro-batches to the last ones, which keep least, for a while.

Source: Kim et al., BPipe, 2023. Rank x of the first half is paired with rank D-1-x. The order of compute is 1F1B's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b
from runner.schedule.values import Action, Move, Op, Schedule

__all__ = ["bpipe", "most_kept"]


def most_kept(ranks: int) -> int:
    """Micro-batches that a rank keeps at most: half of the D + 1 that 1F1B keeps on both ranks of a pair."""
    return ranks // 2 + 1


def bpipe(ranks: int, microbatches: int) -> Schedule:
    """BPipe.

    Args:
        ranks: D, even.
        microbatches: any number.
    """
    order = one_f_one_b(ranks, microbatches)
    rows = order.actions[: ranks // 2]
    moves = [
        move for rank, row in enumerate(rows) for move in _moves(row, host=ranks - 1 - rank, most=most_kept(ranks))
    ]
    return replace(order, name="bpipe", moves=tuple(moves))


def _moves(row: Sequence[Action], *, host: int, most: int) -> Iterator[Move]:
    """What a rank hands over: the youngest it keeps, where there is no room; each is back one action before its B."""
    kept: list[int] = []
    away: dict[int, Action] = {}  # micro-batch -> the action after which it left
    for index, action in enumerate(row):
        soon = {each.microbatch for each in row[index : index + 2] if each.op is Op.B}
        coming = [microbatch for microbatch in away if microbatch in soon]
        room = most - len(coming) - (action.op is Op.F)
        before = row[index - 1]
        while len(kept) > room:
            youngest = max(microbatch for microbatch in kept if microbatch not in soon)
            kept.remove(youngest)
            away[youngest] = before
        for microbatch in coming:
            kept.append(microbatch)
            yield Move(action.stage, microbatch, host, leaves=away.pop(microbatch), returns=before)
        assert action.microbatch is not None  # compute always has one
        if action.op is Op.F:
            kept.append(action.microbatch)
        else:
            kept.remove(action.microbatch)
