"""Finds the bytes that the moved segments of a stage move, layer by layer.

A tensor that several layers save is moved, or stays, with the first of them: memory is moved as a whole, and this
layer's backward is the last to need it. The stage's input and the output of its last layer stay, because the engine
holds them until the backward. :mod:`runner.memory.apply.trip` does what is predicted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.values import Segment
from runner.profile import LayerProfile, SplitBackward

__all__ = ["PlacedSegment", "with_moves"]


class PlacedSegment(NamedTuple):
    """A segment, and the first and last of its layers, counted from the stage's first."""

    segment: Segment
    start: int
    end: int


@dataclass(slots=True)
class _Layer:
    """What is moved of one layer.

    Args:
        moved: bytes that are copied to the host and back.
        freed: the part of them that nothing else holds on the device meanwhile.
        needs: the layers whose tensors its backward reads.
    """

    moved: int = 0
    freed: int = 0
    needs: frozenset[int] = frozenset()


def with_moves(
    rows: Sequence[LayerProfile],
    chain: Sequence[LayerProfile],
    tensors: StageTensors,
    segments: Sequence[PlacedSegment],
) -> list[LayerProfile]:
    """The rows of a stage, with less that is saved, and with what comes back in their backwards.

    While a layer runs backward, the device holds what it reads, and at most as much of earlier layers as the largest
    of them has moved: the mover fetches no more ahead. A backward in two parts fetches everything at its beginning.

    Args:
        rows: the rows of the layers without moves, and of the loss if the stage is the last.
        chain: the same rows as they were profiled.
        tensors: the tensors between them.
        segments: the stage's program.
    """
    if not any(each.segment.moved for each in segments):
        return list(rows)
    last = segments[-1].end
    layers = [*_layers(chain, tensors, segments), *(_Layer() for _ in rows[last + 1 :])]
    largest, total = max(each.moved for each in layers), sum(each.moved for each in layers)
    made = []
    for at, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        entering = sum(layers[owner].freed for owner in layer.needs if owner < at)
        back = sum(layers[owner].moved for owner in layer.needs)
        ahead = _ahead([each.moved for each in layers[:at]], room=largest)
        made.append(_row(row, layer, entering, back + ahead, total))
    return made


def _ahead(before: Sequence[int], room: int) -> int:
    """The bytes of earlier layers that have come back already: of as many of the last ones as there is room for."""
    fitting = [num_bytes for num_bytes in accumulate(reversed(before)) if num_bytes <= room]
    return max(fitting, default=0)


def _row(row: LayerProfile, layer: _Layer, entering: int, fetched: int, total: int) -> LayerProfile:
    """One row with moves.

    Args:
        entering: bytes that earlier layers have moved and that this layer may still use in its forward.
        fetched: bytes that its backward has on the device again.
        total: bytes that the stage moves.
    """
    chained, split = row.chained_backward_bytes, row.split
    if split is None:  # then W needs all that was saved, and it has been fetched
        split = SplitBackward(row.saved_bytes, 0, 0, row.backward_transient_bytes)
    of_i = split.chained_transient_bytes
    return replace(
        row,
        saved_bytes=row.saved_bytes - layer.freed,
        moved_bytes=layer.moved,
        forward_transient_bytes=row.forward_transient_bytes + layer.freed + entering,
        backward_transient_bytes=row.backward_transient_bytes + fetched,
        chained_backward_bytes=None if chained is None else chained + fetched,
        split=replace(
            split,
            transient_bytes=split.transient_bytes + total,
            chained_transient_bytes=None if of_i is None else of_i + total,
        ),
    )


def _layers(chain: Sequence[LayerProfile], tensors: StageTensors, segments: Sequence[PlacedSegment]) -> list[_Layer]:
    last = segments[-1].end
    layers = [_Layer() for _ in range(last + 1)]
    owner: dict[int, int] = {}  # storage -> the layer with which it is moved or stays
    leaving = tensors.outputs(last)
    for segment, start, end in segments:
        again: Mapping[int, int] = tensors.inputs(start) if _saves_anything(chain, tensors, start, end) else {}
        for at in range(start, end + 1):
            held = again if segment.recompute else _saved(tensors, at)
            own = [storage for storage in held if storage not in owner] if at == start or not segment.recompute else []
            owner |= dict.fromkeys(own, at)
            layers[at].needs = frozenset({start if segment.recompute else at, *(owner[storage] for storage in held)})
            if segment.moved and (at == start or not segment.recompute):
                inner = 0 if segment.recompute else chain[at].saved_bytes - tensors.made_bytes(at)
                going = [each for each in own if end < last or each not in leaving]
                layers[at].moved = inner + sum(held[each] for each in going)
                layers[at].freed = inner + sum(held[each] for each in going if each not in leaving)
    return layers


def _saves_anything(chain: Sequence[LayerProfile], tensors: StageTensors, start: int, end: int) -> bool:
    """Whether a segment's backward reads any tensor; if not, its input is not kept to compute it again."""
    layers = range(start, end + 1)
    return any(tensors.saves(at) or chain[at].saved_bytes > tensors.made_bytes(at) for at in layers)


def _saved(tensors: StageTensors, at: int) -> dict[int, int]:
    """Bytes of a layer's input and output that its autograd keeps, by storage, without inputs of the stage."""
    near = {**tensors.inputs(at), **tensors.outputs(at)}
    return {storage: near[storage] for storage in tensors.saves(at) & near.keys()}
