"""Finds the bytes that the moved segments of a stage move, layer by layer.

A tensor that several layers save is moved, or stays, with the first of them: memory is moved as a whole, and this
layer's backward is the last to need it. The stage's input and the output of its last layer stay, because the engine
holds them until the backward. :mod:`runner.memory.apply.trip` does what is predicted here, and
:mod:`runner.plan.stages.on_the_way` adds up what is on its way at any moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.values import Segment
from runner.profile import LayerMoves, LayerProfile, SplitBackward

__all__ = ["PlacedSegment", "with_moves"]


class PlacedSegment(NamedTuple):
    """A segment, and the first and last of its layers, counted from the stage's first."""

    segment: Segment
    start: int
    end: int


def with_moves(
    rows: Sequence[LayerProfile],
    chain: Sequence[LayerProfile],
    tensors: StageTensors,
    segments: Sequence[PlacedSegment],
) -> list[LayerProfile]:
    """The rows of a stage, with less that is saved, and with what is moved of each.

    A layer's forward holds what it saves, and is then counted without what is moved of it. What is on its way, or has
    come back, is in no row, except for a backward in two parts: it fetches everything at its beginning.

    Args:
        rows: the rows of the layers without moves, and of the loss if the stage is the last.
        chain: the same rows as they were profiled.
        tensors: the tensors between them.
        segments: the stage's program.
    """
    if not any(each.segment.moved for each in segments):
        return list(rows)
    last = segments[-1].end
    moves = [*_moves(chain, tensors, segments), *(LayerMoves() for _ in rows[last + 1 :])]
    so_far = accumulate(each.num_bytes for each in moves)
    return [_row(row, each, back) for row, each, back in zip(rows, moves, so_far, strict=True)]


def _row(row: LayerProfile, moves: LayerMoves, back: int) -> LayerProfile:
    """One row with moves.

    Args:
        back: bytes that this layer and those before it have moved. They are all back in the first part of its backward,
            where that is split; of later layers, only what their second parts need is left.
    """
    split = row.split
    if split is None:  # then W needs all that was saved, and it has been fetched
        split = SplitBackward(row.saved_bytes, 0, 0, row.backward_transient_bytes)
    return replace(
        row,
        saved_bytes=row.saved_bytes - moves.freed_bytes,
        moves=moves,
        forward_transient_bytes=row.forward_transient_bytes + moves.freed_bytes,
        split=split.with_more(back),
    )


def _moves(chain: Sequence[LayerProfile], tensors: StageTensors, segments: Sequence[PlacedSegment]) -> list[LayerMoves]:
    last = segments[-1].end
    made = [LayerMoves() for _ in range(last + 1)]
    owner: dict[int, int] = {}  # storage -> the layer with which it is moved or stays
    away: dict[int, int] = {}  # storage that is moved -> its bytes
    leaving = tensors.outputs(last)
    for segment, start, end in segments:
        again: Mapping[int, int] = tensors.inputs(start) if _saves_anything(chain, tensors, start, end) else {}
        for at in range(start, end + 1):
            held = again if segment.recompute else _saved(tensors, at)
            own = [storage for storage in held if storage not in owner] if at == start or not segment.recompute else []
            entering = _entering(tensors.inputs(at), owner, away, at)
            owner |= dict.fromkeys(own, at)
            needs = {start if segment.recompute else at, *(owner[storage] for storage in held)}
            made[at] = LayerMoves(needs=tuple(sorted(at - each for each in needs)), entering=entering)
            if segment.moved and (at == start or not segment.recompute):
                inner = 0 if segment.recompute else chain[at].saved_bytes - tensors.made_bytes(at)
                going = {each: held[each] for each in own if end < last or each not in leaving}
                freed = {storage: size for storage, size in going.items() if storage not in leaving}
                away |= freed
                made[at] = replace(
                    made[at],
                    num_bytes=inner + sum(going.values()),
                    freed_bytes=inner + sum(freed.values()),
                    sent_after=end - at if segment.recompute else 0,
                    one_by_one=segment.one_by_one,
                    # a segment that is computed again asks for its input before it does anything
                    asking_bytes=0
                    if segment.recompute
                    else _asking_bytes(chain[at], leaving.keys() & held, at == last),
                )
    return made


def _asking_bytes(layer: LayerProfile, kept: Collection[int], ends: bool) -> int:
    """What a layer's backward makes before it asks for what was moved of what the layer has saved.

    Args:
        layer: the layer.
        kept: what it has saved of the stage's output, which stays. An operator that saves its output, such as a
            hyperbolic tangent, then makes a gradient of this size, and asks for nothing else.
        ends: whether it is the stage's last layer.
    """
    return layer.asking_bytes + (layer.gradient_of_output_bytes if kept and ends else 0)


def _entering(
    inputs: Mapping[int, int], owner: Mapping[int, int], away: Mapping[int, int], at: int
) -> tuple[tuple[int, int], ...]:
    """How far the layers are that have moved a part of a layer's input, and the bytes of it."""
    found: dict[int, int] = {}
    for storage in inputs.keys() & away.keys():
        distance = at - owner[storage]
        found[distance] = found.get(distance, 0) + inputs[storage]
    return tuple(sorted(found.items()))


def _saves_anything(chain: Sequence[LayerProfile], tensors: StageTensors, start: int, end: int) -> bool:
    """Whether a segment's backward reads any tensor; if not, its input is not kept to compute it again."""
    layers = range(start, end + 1)
    return any(tensors.saves(at) or chain[at].saved_bytes > tensors.made_bytes(at) for at in layers)


def _saved(tensors: StageTensors, at: int) -> dict[int, int]:
    """Bytes of a layer's input and output that its autograd keeps, by storage, without inputs of the stage."""
    near = {**tensors.inputs(at), **tensors.outputs(at)}
    return {storage: near[storage] for storage in tensors.saves(at) & near.keys()}
