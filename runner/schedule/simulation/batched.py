"""Plays one order with many sets of durations at once: the order does not depend on them, so it is walked once.

The ends are those of :func:`runner.schedule.simulation.clock.simulate`, bit for bit, because every action takes the
same maxima and sums, only of vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.schedule.values import COMPUTE, MOVES, Op, Schedule
from runner.schedule.walk import walk

__all__ = ["BatchedCosts", "CompiledOrder", "Held", "Numbers", "compiled", "held_at_once"]

Numbers: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class BatchedCosts:
    """Durations of K candidates; each array has a row for each stage, and a column for each candidate.

    Args:
        forward, backward: seconds of a micro-batch's forward and of its whole backward, shape (stages, K).
        input_gradient, weight_gradient: seconds of the parts of a backward in two, shape (stages, K).
        message: seconds of a message between stages s and s + 1, shape (stages - 1, K).
    """

    forward: Numbers
    backward: Numbers
    input_gradient: Numbers
    weight_gradient: Numbers
    message: Numbers


class _Played(NamedTuple):
    """One action as it is played: its rank, its op's place among :data:`_OPS` (-1: a move), its stage, the size of its
    micro-batch in units of the mean, and what it waits for."""

    rank: int
    op: int
    stage: int
    size: float
    waits_for: tuple[tuple[int, int], ...]  # each: place of an earlier action, and the edge of its message or -1
    is_awaited: bool


_OPS = (Op.F, Op.B, Op.I, Op.W, Op.R)


@dataclass(frozen=True)
class CompiledOrder:
    """An order that can be played for many candidates at once.

    Args:
        ranks, stages: how many the schedule has.
        actions: all actions in an order in which they can run.
    """

    ranks: int
    stages: int
    actions: tuple[_Played, ...]

    def play(self, costs: BatchedCosts) -> Numbers:
        """The end of each rank's last action, shape (ranks, K), in the unit of the costs."""
        parts = costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient, costs.forward
        durations, message = [list(each) for each in parts], list(costs.message)
        nothing = np.zeros(costs.forward.shape[1])
        free: list[Numbers] = [nothing] * self.ranks
        ended: list[Numbers | None] = [None] * len(self.actions)
        for place, (rank, op, stage, size, waits_for, is_awaited) in enumerate(self.actions):
            start = free[rank]
            for needed, edge in waits_for:
                arrived = ended[needed]
                assert arrived is not None  # the order is topological
                start = np.maximum(start, arrived if edge < 0 else arrived + message[edge])
            end = start
            if op >= 0:
                seconds = durations[op][stage]
                free[rank] = end = start + (seconds if size == 1.0 else seconds * size)
            if is_awaited:
                ended[place] = end
        return np.stack(free)

    def makespan(self, costs: BatchedCosts) -> Numbers:
        """The end of the last action of all ranks, shape (K,)."""
        latest: Numbers = self.play(costs).max(axis=0)
        return latest


def compiled(schedule: Schedule) -> CompiledOrder | None:
    """Walk a schedule once, for :meth:`CompiledOrder.play`.

    Returns:
        None for a schedule whose ranks fill their bubbles, which have durations of their own, or may leave their order.

    Raises:
        ValueError: the schedule hangs.
    """
    if schedule.ahead or schedule.filling is not None:
        return None
    walked = walk(schedule)
    if walked.stuck:
        raise ValueError(f"{schedule.name} hangs at {walked.stuck[0].action}")
    places: dict[object, int] = {}
    ends_before: list[int] = []  # the rank that is free only when the action has ended; -1: none
    found: list[tuple[int, int, int, float, tuple[tuple[int, int], ...]]] = []
    for rank, _, action, waits_for in walked.steps:
        needs = []
        for needed in waits_for:
            at = places[needed]
            if ends_before[at] == rank:
                continue
            crosses = needed.stage != action.stage and action.op in COMPUTE
            needs.append((at, min(needed.stage, action.stage) if crosses else -1))
        places[action] = len(found)
        moves = action.op in MOVES
        ends_before.append(-1 if moves else rank)
        place, size = -1 if moves else _OPS.index(action.op), schedule.size_of(action.microbatch)
        found.append((rank, place, action.stage, size, tuple(needs)))
    awaited = {at for *_, needs in found for at, _ in needs}
    actions = tuple(_Played(*each, at in awaited) for at, each in enumerate(found))
    return CompiledOrder(schedule.ranks, schedule.stages, actions)


class Held(NamedTuple):
    """How many micro-batches of each of a rank's stages are alive at one moment; tuples are by stage of the rank.

    Args:
        whole: how many there are with everything that the forward saved.
        left_to_w: how many there are with what W needs alone.
        inputs: how many there are with the stage's input alone, because it is run forward again.
    """

    whole: tuple[int, ...]
    left_to_w: tuple[int, ...]
    inputs: tuple[int, ...]


def held_at_once(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """For each rank the moments at which it holds most: those that no other moment exceeds in every number."""
    return tuple(_largest(_moments(schedule, rank)) for rank in range(schedule.ranks))


def _moments(schedule: Schedule, rank: int) -> set[Held]:
    stages = schedule.stages_of(rank)
    place = {stage: at for at, stage in enumerate(stages)}
    whole, left, inputs = ([0] * len(stages) for _ in range(3))
    found = set()
    for action in schedule.actions[rank]:
        if action.op in MOVES or action.op is Op.FILL or action.microbatch is None:
            continue
        at, again = place[action.stage], schedule.is_recomputed(action.stage, action.microbatch)
        if action.op is Op.F:
            (inputs if again else whole)[at] += 1
        elif action.op is Op.R:
            whole[at] += 1
            inputs[at] -= not schedule.has_other_backward(action.stage)
        found.add(Held(tuple(whole), tuple(left), tuple(inputs)))
        if action.op is Op.B:
            whole[at] -= 1
        elif action.op is Op.I:
            whole[at] -= 1
            left[at] += 1
        elif action.op is Op.W:
            left[at] -= 1
    return found


def _largest(moments: set[Held]) -> tuple[Held, ...]:
    """Those moments that no other one exceeds; a micro-batch that is there as a whole is more than a part of it."""

    def more(one: Held, other: Held) -> bool:
        sums = zip(one.whole, one.left_to_w, one.inputs, other.whole, other.left_to_w, other.inputs, strict=True)
        return all(w >= x and w + left >= x + y and w + left + i >= x + y + z for w, left, i, x, y, z in sums)

    kept: list[Held] = []
    for one in sorted(moments, key=lambda each: (sum(each.whole), sum(each.left_to_w), each), reverse=True):
        if not any(more(other, one) for other in kept):
            kept.append(one)
    return tuple(kept)
