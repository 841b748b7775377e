"""Periodic patterns of stages on ranks that may hold several, with what each keeps.

All actions of a micro-batch are one chain: forwards and messages to the last stage, backwards and messages to the
first. The next micro-batch does the same one period later. A pattern is the start of each action; two actions of one
rank, or of one pair of ranks that exchange messages, may not meet in any period, and what a rank's stages keep must
fit.

The search begins with the earliest starts that meet all demands. Where two actions meet, every pattern has them at
least as far apart as the next gap, or at most as far as the gap before. Where a rank keeps too much, one of its stages
keeps a micro-batch less in every pattern. Each of these is a least distance between two starts; what leaves fewest
choices is demanded first, and all choices are tried. No action waits for a whole period, because it could start one
period earlier.

Source: the problem is that of Beaumont et al. 2021, Pipelined model parallelism; the paper has an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Pattern", "Placed", "pattern_for", "shortest_pattern"]

_ROUNDING = 1e-9  # of a period, within which two actions touch
_EXACT = 1e-12  # of a period, to which starts are found
_HALVINGS = 30
_NEAR = 1e-6  # part of the period within which the bisection ends
_MOST = 3000  # demands that are tried for one period


class Placed(NamedTuple):
    """One stage of a pattern.

    Args:
        rank: its rank; a rank's stages share its time and its memory.
        forward, backward: seconds of a micro-batch.
        saved: bytes that a micro-batch keeps from its forward to the end of its backward.
        message: seconds of the message to the next stage, and of that back; 0 after the last stage.
    """

    rank: int
    forward: float
    backward: float
    saved: float
    message: float


class Pattern(NamedTuple):
    """A pattern.

    Args:
        period: seconds from one micro-batch to the next.
        starts: seconds until each stage's forward of the first one, and then until each backward, from the last stage.
        kept: the micro-batches that each stage keeps at most.
    """

    period: float
    starts: tuple[float, ...]
    kept: tuple[int, ...]


class _Step(NamedTuple):
    where: tuple[int, ...]  # a rank, or two that exchange a message
    seconds: float
    stage: int | None = None  # None of a message


class _Chain:
    """The actions of a micro-batch, in their order."""

    def __init__(self, stages: Sequence[Placed]) -> None:
        there = list[_Step]()
        back = list[_Step]()
        for stage, (each, after) in enumerate(zip(stages, [*stages[1:], None], strict=True)):
            there.append(_Step((each.rank,), each.forward, stage))
            back.append(_Step((each.rank,), each.backward, stage))
            if after is not None and each.message:
                message = _Step(tuple(sorted((each.rank, after.rank))), each.message)
                there.append(message)
                back.append(message)
        self.stages = stages
        self.steps = [*there, *reversed(back)]
        last = len(self.steps) - 1
        self.pairs = [
            (one, two)
            for two, step in enumerate(self.steps)
            for one in range(two)
            if self.steps[one].where == step.where
        ]
        self.forwards = [place for place, step in enumerate(there) if step.stage is not None]
        self.backwards = [last - place for place in self.forwards]
        self.loads: dict[tuple[int, ...], float] = {}
        for step in self.steps:
            self.loads[step.where] = self.loads.get(step.where, 0.0) + step.seconds

    def kept(self, starts: Sequence[float], period: float) -> tuple[int, ...]:
        """The micro-batches that each stage keeps at most."""
        ends = [starts[place] + self.steps[place].seconds for place in self.backwards]
        pairs = zip(ends, self.forwards, strict=True)
        return tuple(math.ceil((end - starts[place]) / period - _ROUNDING) for end, place in pairs)


def shortest_pattern(stages: Sequence[Placed], rooms: Sequence[float], below: float) -> Pattern | None:
    """The pattern of the shortest period, to a millionth; None if there is none with a period of at most ``below``.

    Args:
        stages: the stages in the order of the layers.
        rooms: bytes for what is kept, by rank.
        below: the longest period in seconds that is of interest.
    """
    low = max(_Chain(stages).loads.values())
    found = pattern_for(stages, rooms, below)
    if found is None:
        return None
    if (least := pattern_for(stages, rooms, low)) is not None:
        return least
    high = below
    for _ in range(_HALVINGS):
        if high - low <= _NEAR * high:
            break
        middle = (low + high) / 2
        made = pattern_for(stages, rooms, middle)
        if made is None:
            low = middle
        else:
            high, found = middle, made
    return found


def pattern_for(stages: Sequence[Placed], rooms: Sequence[float], period: float) -> Pattern | None:
    """A pattern of this period; None if there is none, or if none was found among the first thousands of demands."""
    chain = _Chain(stages)
    if max(chain.loads.values()) > period * (1 + _ROUNDING):
        return None
    steps = chain.steps
    after = [(place, place + 1, step.seconds) for place, step in enumerate(steps[:-1])]
    waits = [(place + 1, place, -step.seconds - period) for place, step in enumerate(steps[:-1])]
    demands = [*after, *waits]
    first = _earliest([0.0] * len(steps), demands, period)
    left = [] if first is None else [(first, demands)]
    for _ in range(_MOST):
        if not left:
            return None
        starts, demands = left.pop()
        fewest: list[tuple[list[float], list[_Demand]]] | None = None
        for choices in _broken(chain, rooms, starts, period):
            tried = ((_earliest(starts, [*demands, each], period), each) for each in choices)
            made = [(found, [*demands, each]) for found, each in tried if found is not None]
            if fewest is None or len(made) < len(fewest):
                fewest = made
            if len(fewest) <= 1:
                break
        if fewest is None:
            own = (*chain.forwards, *reversed(chain.backwards))
            return Pattern(period, tuple(starts[place] for place in own), chain.kept(starts, period))
        left += sorted(fewest, key=lambda each: -sum(each[0]))
    return None


_Demand = tuple[int, int, float]
"""The second of two actions starts at least so many seconds after the first one."""


def _earliest(starts: Sequence[float], demands: Sequence[_Demand], period: float) -> list[float] | None:
    """The earliest starts, none before those given, that meet all demands; None if none do."""
    found, slack = list(starts), _EXACT * period
    for _ in range(len(found) + 1):
        moved = False
        for one, two, distance in demands:
            if found[one] + distance > found[two] + slack:
                found[two], moved = found[one] + distance, True
        if not moved:
            return found
        if found[0] > slack:
            return None  # the first action waits for itself
    return None


def _broken(chain: _Chain, rooms: Sequence[float], starts: Sequence[float], period: float) -> Iterator[list[_Demand]]:
    """For each way in which these starts are no pattern, demands of which every later pattern meets at least one."""
    slack = _ROUNDING * period
    for one, two in chain.pairs:
        distance, first, second = starts[two] - starts[one], chain.steps[one].seconds, chain.steps[two].seconds
        turn = math.floor((distance + slack) / period) * period
        if distance < turn + first - slack:  # the second begins before the first of that period has ended
            yield [(one, two, turn + first), (two, one, second - turn)]
        elif distance > turn + period - second + slack:
            yield [(one, two, turn + period + first), (two, one, second - turn - period)]
    kept = chain.kept(starts, period)
    for rank, room in enumerate(rooms):
        own = [stage for stage, each in enumerate(chain.stages) if each.rank == rank]
        if sum(kept[stage] * chain.stages[stage].saved for stage in own) > room:
            yield list(_fewer(chain, own, kept, period))


def _fewer(chain: _Chain, own: Sequence[int], kept: Sequence[int], period: float) -> Iterator[_Demand]:
    for stage in own:
        if kept[stage] > 1:
            back, forward = chain.backwards[stage], chain.forwards[stage]
            yield back, forward, chain.steps[back].seconds - (kept[stage] - 1) * period
