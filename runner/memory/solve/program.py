"""Lists a chain program step by step: the order in which layers run forward and backward, and what each run keeps.

This module alone defines how a program is executed. ``apply`` executes it with nested checkpoints, ``adjust`` predicts
its cost, and the tests count its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from runner.memory.solve.values import ChainProgram, Program, Segment, StageProgram

__all__ = [
    "DEEPEST",
    "moves_tensors",
    "Operation",
    "Step",
    "check_program",
    "depth",
    "ends",
    "forwards",
    "operations",
    "reruns",
    "second_run",
]

DEEPEST = 64
"""The deepest nesting of segments that can be run. Each is a checkpoint around the next, about eight calls deep, and
Python's stack ends at a thousand calls."""


class Step(Enum):
    """A way to run one layer."""

    FORWARD = "Fno"
    """The layer runs forward; neither its input nor what autograd would save is kept."""

    FORWARD_FROM_KEPT = "Fck"
    """The layer runs forward without a graph, but its input is kept: a later run starts from it."""

    FORWARD_WITH_GRAPH = "Fall"
    """The layer runs forward, and what autograd saves is kept for its backward."""

    BACKWARD = "B"
    """The layer runs backward, and what was kept for it is dropped."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of one layer.

    Args:
        step: what is done.
        layer: index in the whole model.
    """

    step: Step
    layer: int


def operations(program: ChainProgram) -> Iterator[Operation]:
    """Every step of a program in the order of execution: the stage's forward, then its backward."""
    yield from _forward(program)
    yield from _backward(program)


def second_run(segment: Segment) -> ChainProgram:
    """The program by which a segment is run forward again."""
    return segment.inside or (Segment(segment.first, segment.last),)


def reruns(segment: Segment) -> Counter[int]:
    """How often each layer of a segment runs forward within the segment's backward."""
    return Counter(each.layer for each in _backward((segment,)) if each.step is not Step.BACKWARD)


def ends(program: Program) -> tuple[int, int]:
    """The first and the last layer of a program, as indices in the whole model."""
    if isinstance(program, StageProgram):
        return program.first, program.last
    return program[0].first, program[-1].last


def moves_tensors(program: Program) -> bool:
    """Whether some of what the stage saves is moved to the host's memory."""
    return isinstance(program, tuple) and any(segment.moved for segment in program)


def depth(program: Program) -> int:
    """How deep segments that are run again are nested in each other, at most."""
    if isinstance(program, StageProgram):
        return 0
    return max((1 + depth(segment.inside) for segment in program if segment.recompute), default=0)


def forwards(program: Program) -> int:
    """The total number of forwards of layers, including the first ones; an estimate if the run decides."""
    if isinstance(program, StageProgram):
        return program.forwards
    return sum(each.step is not Step.BACKWARD for each in operations(program))


def _forward(program: Sequence[Segment]) -> Iterator[Operation]:
    for segment in program:
        for layer in range(segment.first, segment.last + 1):
            dropped = Step.FORWARD_FROM_KEPT if layer == segment.first else Step.FORWARD
            yield Operation(dropped if segment.recompute else Step.FORWARD_WITH_GRAPH, layer)


def _backward(program: Sequence[Segment]) -> Iterator[Operation]:
    for segment in reversed(program):
        if segment.recompute:
            again = second_run(segment)
            needed = again[:-1] if again[-1].recompute else again  # the output of a second run is not needed
            yield from _forward(needed)
            yield from _backward(again)
        else:
            yield from (Operation(Step.BACKWARD, layer) for layer in range(segment.last, segment.first - 1, -1))


def check_program(program: Sequence[Segment], first: int, last: int) -> str | None:
    """What is wrong with a program of layers ``first`` to ``last``, in words; None if it is right."""
    expected = first
    for segment in program:
        if segment.first != expected or segment.last < segment.first:
            return f"segment {segment.first} .. {segment.last} stands where layer {expected} is next"
        expected = segment.last + 1
        wrong = _check_inside(segment)
        if wrong is not None:
            return wrong
    return None if expected == last + 1 else f"it ends before layer {expected} of {first} .. {last}"


def _check_inside(segment: Segment) -> str | None:
    if not segment.inside:
        return None
    if not segment.recompute or segment.save_ops is not None:
        return f"segment {segment.first} .. {segment.last} has a program inside and is not wholly computed again"
    if any(each.save_ops is not None for each in segment.inside):
        return f"operators are chosen inside of segment {segment.first} .. {segment.last}"
    if any(each.moved for each in segment.inside):
        return f"a part of segment {segment.first} .. {segment.last}, which runs again, is moved by itself"
    return check_program(segment.inside, segment.first, segment.last)
