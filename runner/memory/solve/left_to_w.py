"""Counts each tensor between a stage's layers that the gradients of weights need once, however many layers need it.

A layer's profile says how much W needs of the layer's input: of what autograd saves of it, at most. A tensor that many
layers read, as the sequence of an unrolled network, is alive once. It is counted in the row that counts it as saved, so
that it is alive in I before and after the backward of that row's layer. An input of the stage is counted in the first
row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from runner.memory.solve.tensors import StageTensors
from runner.profile import LayerProfile

__all__ = ["with_needs_of_w"]


def with_needs_of_w(rows: Sequence[LayerProfile], tensors: StageTensors) -> list[LayerProfile]:
    """The rows of a stage's layers, and of the loss if there is one, in which no tensor that W needs counts twice.

    Args:
        rows: the rows, after it is decided what is kept; a row of which it is not known what W needs stays as it is.
        tensors: the tensors between the layers.
    """
    inputs = [_needed(row, tensors, at) for at, row in enumerate(rows)]
    needed = set[int]().union(*inputs)
    own = defaultdict[int, int](int)
    for storage in needed:
        counted = tensors.row_of(storage)
        if counted is not None:
            own[counted] += tensors.size_of(storage)
    given, held = tensors.given_bytes(needed), sum(map(tensors.size_of, needed & tensors.leaving))
    found = []
    for at, row in enumerate(rows):
        split = row.split
        if split is not None:
            known_bytes = sum(map(tensors.size_of, inputs[at])) + tensors.given_bytes(inputs[at])
            of_input = max(0, split.input_bytes - known_bytes)
            split = replace(
                split,
                deferred_bytes=split.deferred_bytes + own[at],
                input_bytes=max(given, of_input) if at == 0 else of_input,
                held_bytes=held if at == len(rows) - 1 else 0,
            )
        found.append(replace(row, split=split))
    return found


def _needed(row: LayerProfile, tensors: StageTensors, at: int) -> set[int]:
    """The storages of a layer's input of which W may need anything; empty if it needs none, or they are not known."""
    known = row.output and row.split is not None and row.split.input_bytes
    return tensors.saves(at) - tensors.made(at).keys() if known else set()
