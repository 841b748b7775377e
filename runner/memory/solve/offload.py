"""Defines an offload strategy: which of a stage's saved tensors are in the host's memory until their backward."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from runner.memory.solve.values import ChainProgram, Segment, StageChain

__all__ = ["Offload", "moving"]

Mover = Callable[[StageChain, ChainProgram], ChainProgram]
"""A function from a stage's chain and the program of its activation policy to the same program with moves."""


@dataclass(frozen=True, slots=True)
class Offload:
    """One way to choose what is moved.

    Args:
        name: how ``offload.activations`` names it.
        move: marks the segments that are moved. It is pure: the same chain and program give the same result.
        source: the publication or software from which it comes.
        about: what it does, in one line.
    """

    name: str
    move: Mover
    source: str = ""
    about: str = ""


def moving(program: ChainProgram, chosen: Collection[int]) -> ChainProgram:
    """The program with moves. Layers that keep what they save are moved one by one, each as soon as it has run.

    Args:
        program: the program of a stage.
        chosen: the layers that are moved, as indices in the whole model. A segment that is computed again is moved if
            its first layer is chosen: its input is all that it keeps.
    """
    made: list[Segment] = []
    for segment in program:
        if segment.recompute:
            made.append(replace(segment, moved=segment.first in chosen))
        else:
            layers = range(segment.first, segment.last + 1)
            made += [replace(segment, first=layer, last=layer, moved=layer in chosen) for layer in layers]
    return tuple(made)
