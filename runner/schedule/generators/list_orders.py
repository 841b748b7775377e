"""Orders from list scheduling, for any placement of stages: one for each rule to choose among ready actions.

Whenever a rank is free, it starts the most urgent of its ready actions, as :mod:`.list_scheduling` does with any rule.
A search makes many such orders of a few ten thousand actions, so here the actions are numbers, what they wait for is
found once for all rules, and an order is given up as soon as it cannot be short enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from runner.schedule.dependencies import dependencies
from runner.schedule.generators.layout import backward, forward, input_gradient, weight_gradient
from runner.schedule.simulation.clock import StageCosts, durations
from runner.schedule.values import Action, Op, Schedule

__all__ = ["list_orders", "num_rules", "shortest_order"]

_LATER = 1 + 1e-9  # moments that differ by less are the same
_URGES, _TAPERS = (0.25, 0.5, 1.0), (0, 1, 2)


def list_orders(
    name: str, placed: Schedule, costs: StageCosts, limit: int, *, split: bool = True
) -> Iterator[Schedule]:
    """Yield one order for each rule that finishes under the limit.

    Args:
        name: name of the schedules.
        placed: gives the placement of stages and the pipeline of each micro-batch; its order is not used.
        costs: durations of each stage, and of messages.
        limit: number of micro-batches that a rank may keep between F and B or W, for all its chunks, at least 1.
        split: whether backwards are I and W, or B.
    """
    draft = _draft(name, placed, split=split)
    work = _Work.of(draft, costs)
    for rule in _rules(draft, costs, limit, split=split):
        found = _Run(work, rule, math.inf).order()
        if found is not None and found[1] is not None:
            yield replace(draft, actions=found[1])


def shortest_order(
    name: str, placed: Schedule, costs: StageCosts, limit: int, below: float, *, split: bool = True
) -> tuple[float, Schedule | None] | None:
    """The end and the order of the first rule whose order is the shortest; None if no rule finishes under the limit.

    Args:
        name, placed, costs, limit, split: see :func:`list_orders`.
        below: if all orders would end at this moment or later, there is none, and the end is this moment.
    """
    draft = _draft(name, placed, split=split)
    work = _Work.of(draft, costs)
    finishes, best = False, None
    for rule in _rules(draft, costs, limit, split=split):
        found = _Run(work, rule, below).order()
        if found is not None:
            finishes = True
            if found[1] is not None:
                below, best = found
    if not finishes:
        return None
    return below, None if best is None else replace(draft, actions=best)


def num_rules(*, split: bool) -> int:
    """The number of orders that each of these functions makes."""
    return len(_URGES) * len(_patience(split)) * len(_TAPERS)


def _patience(split: bool) -> tuple[bool, ...]:
    return (False, True) if split else (False,)


def _draft(name: str, placed: Schedule, *, split: bool) -> Schedule:
    """Every action on its rank, in any order."""
    makes = (forward, input_gradient, weight_gradient) if split else (forward, backward)
    rows: list[list[Action]] = [[] for _ in range(placed.ranks)]
    for microbatch, pipeline in enumerate(placed.pipeline_of_microbatch):
        for stage, rank in enumerate(placed.placement[pipeline]):
            rows[rank] += [make(stage, microbatch) for make in makes]
    return replace(placed, name=name, actions=tuple(map(tuple, rows)))


def _rules(draft: Schedule, costs: StageCosts, limit: int, *, split: bool) -> Iterator[_Rule]:
    busiest = _busiest(draft, costs)
    for urge, patient, taper in itertools.product(_URGES, _patience(split), _TAPERS):
        yield _Rule(limit * draft.chunks, urge * busiest, patient, taper * draft.chunks)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Chooses among ready actions: the one with the most work after it comes first, and W comes last.

    Args:
        room: number of micro-batches of stages that a rank may keep between F and B or W.
        step: seconds by which a micro-batch is less urgent than the one before it.
        patient: whether to start no W that would still run when an F, B or I becomes ready.
        taper: the number of forwards by which the warm-up of each rank is shorter than that of the rank before.
    """

    room: int
    step: float
    patient: bool
    taper: int


@dataclass(frozen=True, slots=True)
class _Work:
    """The actions of a draft as numbers.

    Args:
        actions: the actions by number, those of each rank in a row.
        rank_of, seconds: the rank and the duration of each action.
        to_come: the time of each action's micro-batch from there to its end; zero for W.
        needed: the number of actions that each one waits for.
        followers: the actions that wait for each one, with the time of the message to them.
        ranks, chunks: how many there are.
    """

    actions: list[Action]
    rank_of: list[int]
    seconds: list[float]
    to_come: list[float]
    needed: list[int]
    followers: list[list[tuple[int, float]]]
    ranks: int
    chunks: int

    @classmethod
    def of(cls, draft: Schedule, costs: StageCosts) -> _Work:
        lasting, to_come = durations(costs, draft), _to_come(draft, costs)
        actions = [action for row in draft.actions for action in row]
        rank_of = [rank for rank, row in enumerate(draft.actions) for _ in row]
        number = {action: index for index, action in enumerate(actions)}
        followers: list[list[tuple[int, float]]] = [[] for _ in actions]
        needed = [0] * len(actions)
        for index, action in enumerate(actions):
            for each in dependencies(draft, action):
                before = number[each]
                away = rank_of[before] != rank_of[index]
                message = lasting[Op.SEND][min(each.stage, action.stage)] if away else 0.0
                followers[before].append((index, message))
                needed[index] += 1
        return cls(
            actions,
            rank_of,
            [lasting[action.work][action.stage] for action in actions],
            [0.0 if action.op is Op.W else to_come[action.op][action.stage] for action in actions],
            needed,
            followers,
            draft.ranks,
            draft.chunks,
        )


_Key = tuple[float, int, str, int, int]
"""What of a ready action decides: urgency, stage, op, micro-batch; then its number."""


class _Run:
    """One order as it is made.

    Args:
        work: the actions.
        rule: chooses among them.
        below: the moment before which it must end.
    """

    def __init__(self, work: _Work, rule: _Rule, below: float) -> None:
        ranks = range(work.ranks)
        self._work, self._rule, self._below = work, rule, below
        self._now = 0.0
        self._alarms: list[tuple[float, int]] = [(0.0, rank) for rank in ranks]  # when a rank may start something
        self._coming: list[list[tuple[float, int]]] = [[] for _ in ranks]  # actions that become ready later
        self._forwards: list[list[list[_Key]]] = [[[] for _ in range(work.chunks)] for _ in ranks]
        self._backwards: list[list[_Key]] = [[] for _ in ranks]
        self._weights: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in ranks]  # by stage
        self._free = [0.0] * work.ranks
        self._held, self._begun, self._returned = [0] * work.ranks, [0] * work.ranks, [0] * work.ranks
        self._needed, self._ready_at = [*work.needed], [0.0] * len(work.actions)
        # The order in its own time, in which nothing that is ready waits for a later moment to be chosen.
        self._ends, self._arrived = [0.0] * work.ranks, [0.0] * len(work.actions)
        self._left = [0.0] * work.ranks  # seconds of what each rank has not started
        for index, rank in enumerate(work.rank_of):
            self._left[rank] += work.seconds[index]
            if not work.needed[index]:
                self._coming[rank].append((0.0, index))
        self._rows: list[list[Action]] = [[] for _ in ranks]

    def order(self) -> tuple[float, tuple[tuple[Action, ...], ...] | None] | None:
        """The end when each rank runs its actions without delay, and these actions in the order in which they start.

        None if some never start, because a rank is full of micro-batches for which later stages have no room. No
        actions if it would not end in time.
        """
        left = len(self._work.actions)
        while left:
            if not self._alarms:
                return None
            now = max(self._alarms[0][0], self._now)
            self._now, due = now, set[int]()
            while self._alarms and self._alarms[0][0] <= now * _LATER:
                due.add(heappop(self._alarms)[1])
            for rank in sorted(due):
                if self._free[rank] > now * _LATER:
                    continue
                index = self._most_urgent(rank)
                if index is not None:
                    self._start(rank, index)
                    left -= 1
                    least = self._ends[rank] + self._left[rank]
                    if least >= self._below * _LATER:
                        return least, None
        end = max(self._ends)
        return end, tuple(map(tuple, self._rows)) if end < self._below else None

    def _most_urgent(self, rank: int) -> int | None:
        """Remove and return the ready action that the rule starts, or None."""
        self._take_ready(rank)
        rule, held, chunks = self._rule, self._held[rank], self._work.chunks
        best: list[_Key] | None = self._backwards[rank] or None
        is_warm = self._returned[rank] > 0 or self._begun[rank] < max(1, rule.room - rule.taper * rank)
        for chunk, ready in enumerate(self._forwards[rank]):
            # A forward leaves room for the later chunks of this micro-batch, or of one before it.
            may_start = held + chunks - 1 - chunk < rule.room and (chunk > 0 or is_warm)
            if ready and may_start and (best is None or ready[0] < best[0]):
                best = ready
        return heappop(best)[-1] if best is not None else self._weight_gradient(rank)

    def _weight_gradient(self, rank: int) -> int | None:
        coming = self._coming[rank]
        next_arrival = coming[0][0] if coming else math.inf
        may_wait = self._rule.patient and self._held[rank] < self._rule.room
        best: list[tuple[int, int, int]] | None = None
        for ready in self._weights[rank].values():
            if not ready or (may_wait and next_arrival < self._now + self._work.seconds[ready[0][-1]]):
                continue
            if best is None or ready[0] < best[0]:
                best = ready
        return None if best is None else heappop(best)[-1]

    def _take_ready(self, rank: int) -> None:
        """Put what is ready by now where the rule looks."""
        coming, moment, work = self._coming[rank], self._now * _LATER, self._work
        while coming and coming[0][0] <= moment:
            _, index = heappop(coming)
            op, stage, microbatch = work.actions[index][:3]
            assert microbatch is not None  # every compute action has one
            if op is Op.W:
                heappush(self._weights[rank].setdefault(stage, []), (microbatch, stage, index))
                continue
            key = (microbatch * self._rule.step - work.to_come[index], stage, op.value, microbatch, index)
            heappush(self._forwards[rank][stage // work.ranks] if op is Op.F else self._backwards[rank], key)

    def _start(self, rank: int, index: int) -> None:
        work = self._work
        action, seconds = work.actions[index], work.seconds[index]
        op = action.op
        self._rows[rank].append(action)
        self._left[rank] -= seconds
        self._held[rank] += (op is Op.F) - (op is Op.B or op is Op.W)
        self._begun[rank] += op is Op.F
        self._returned[rank] += op is Op.B or op is Op.I
        end = self._free[rank] = self._now + seconds
        heappush(self._alarms, (end, rank))
        earliest = self._ends[rank] = max(self._ends[rank], self._arrived[index]) + seconds
        for later, message in work.followers[index]:
            other = work.rank_of[later]
            self._ready_at[later] = max(self._ready_at[later], end + message)
            self._arrived[later] = max(self._arrived[later], earliest + message)
            self._needed[later] -= 1
            if not self._needed[later]:
                heappush(self._coming[other], (self._ready_at[later], later))
                heappush(self._alarms, (self._ready_at[later], other))


def _to_come(draft: Schedule, costs: StageCosts) -> dict[Op, list[float]]:
    """For each stage, the time of a micro-batch from its forward, or its backward, there to its end."""
    messages = [*costs.comm] or [0.0] * (draft.stages - 1)
    backwards = costs.I or costs.B
    back = [sum(backwards[: stage + 1]) + sum(messages[:stage]) for stage in range(draft.stages)]
    there = [sum(costs.F[stage:]) + sum(messages[stage:]) + back[-1] for stage in range(draft.stages)]
    return {Op.F: there, Op.B: back, Op.I: back}


def _busiest(draft: Schedule, costs: StageCosts) -> float:
    """The largest average work of a rank for one micro-batch."""
    share = 1 / len(draft.placement)
    work = [0.0] * draft.ranks
    for row in draft.placement:
        for stage, rank in enumerate(row):
            work[rank] += share * (costs.F[stage] + costs.B[stage])
    return max(work)
