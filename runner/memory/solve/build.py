"""Builds programs from decisions: at each layer, to keep its graph, or to cut off a part that is run forward again.

Strategies that bisect, reverse or plan by dynamic programming differ only in their decisions. A program made of
decisions is persistent: the input of a part that is cut off stays until the backward of this part is over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from runner.memory.solve.program import DEEPEST
from runner.memory.solve.values import ChainProgram, Segment

__all__ = ["Cut", "Decide", "Keep", "equal_parts", "program_of"]

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Keep(Generic[State]):
    """The decision that the first layers keep their graphs until their backward.

    Args:
        last: the last of these layers, as an index in the whole model.
        rest: the state for the layers that follow, such as the memory that is left to them.
    """

    last: int
    rest: State


@dataclass(frozen=True, slots=True)
class Cut(Generic[State]):
    """The decision that the first layers keep only the input of the first, and are run forward again.

    Args:
        last: the last of these layers, as an index in the whole model.
        inside: the state with which their second run is decided; it must not cut off all of them again.
        rest: the state for the layers that follow.
        save_ops: preset of operators whose outputs a single layer keeps besides; None = none.
    """

    last: int
    inside: State
    rest: State
    save_ops: str | None = None


Decide = Callable[[int, int, State], "Keep[State] | Cut[State]"]
"""A function from the first and the last layer of a part, and a state, to a decision about its first layers."""


def program_of(first: int, last: int, state: State, decide: Decide[State], level: int = 0) -> ChainProgram:
    """The program that follows from decisions.

    Segments that would be nested deeper than can be run are left out, so that the program is one level too deep.

    Args:
        first, last: indices of the layers in the whole model, inclusive.
        state: the state with which the first decision is asked for.
        decide: makes a decision.
        level: the number of segments around these layers.
    """
    program = []
    while first <= last:
        made = decide(first, last, state)
        inside: ChainProgram = ()
        if isinstance(made, Cut) and made.last > first and level < DEEPEST:
            inside = program_of(first, made.last, made.inside, decide, level + 1)
        save_ops = made.save_ops if isinstance(made, Cut) else None
        program.append(Segment(first, made.last, recompute=isinstance(made, Cut), save_ops=save_ops, inside=inside))
        first, state = made.last + 1, made.rest
    return tuple(program)


def equal_parts(first: int, last: int, parts: int) -> list[tuple[int, int]]:
    """First and last layer of each of ``parts`` parts, whose lengths differ by one at most; none is empty."""
    count = last - first + 1
    parts = min(parts, count)
    edges = [first + count * number // parts for number in range(parts + 1)]
    return [(start, end - 1) for start, end in zip(edges, edges[1:], strict=False)]
