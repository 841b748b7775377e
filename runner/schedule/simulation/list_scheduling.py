"""List scheduling: whenever a rank is free, it starts the most urgent of the actions that are ready.

The result is only the order. It is found by simulating the draft with given durations. Drawing or running the schedule
with other durations does not change the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from runner.schedule.dependencies import dependencies
from runner.schedule.simulation.clock import Jitter, StageCosts, durations
from runner.schedule.values import Action, Op, Schedule

__all__ = ["Clock", "Urgency", "list_schedule"]

_ROUNDING = 1e-9  # relative tolerance in comparisons of times


class Clock:
    """The state that a rule may read while the order is made.

    Attributes:
        now: the present time.
        started: the start time of each action.
        held: for each rank, number of forwards without their B or W.
        forwards: for each rank, number of F that have begun.
        backwards: for each rank, number of B or I that have begun.
    """

    def __init__(self, draft: Schedule, costs: StageCosts, jitter: Jitter | None = None) -> None:
        self.now = 0.0
        self.started: dict[Action, float] = {}
        self.held = [0] * draft.ranks
        self.forwards = [0] * draft.ranks
        self.backwards = [0] * draft.ranks
        self._durations = durations(costs, draft)
        self._jitter = jitter
        self._arrivals: list[list[float]] = [[] for _ in range(draft.ranks)]
        self._alarms: list[float] = []

    def duration(self, action: Action) -> float:
        """The duration of ``action``."""
        chance = 1.0 if self._jitter is None else self._jitter.factor(action)
        return self._durations[action.work][action.stage] * chance

    def latency(self, made: Action, stage: int) -> float:
        """The time of the message from an action to a neighbouring stage on another rank."""
        chance = 1.0 if self._jitter is None else self._jitter.factor(made, message=True)
        return self._durations[Op.SEND][min(made.stage, stage)] * chance

    def next_arrival(self, rank: int) -> float:
        """The next time when an action of ``rank`` becomes ready because of one that runs now."""
        arrivals = self._arrivals[rank]
        while arrivals and arrivals[0] <= self.now * (1 + _ROUNDING):
            heapq.heappop(arrivals)
        return arrivals[0] if arrivals else float("inf")

    def wake_at(self, moment: float) -> None:
        """Try to start actions on idle ranks again at ``moment``."""
        heapq.heappush(self._alarms, moment)

    def expect(self, rank: int, moment: float) -> None:
        """Note that an action of ``rank`` becomes ready at ``moment``."""
        heapq.heappush(self._arrivals[rank], moment)
        self.wake_at(moment)

    def start(self, rank: int, action: Action) -> float:
        """Start an action now; return the time when it ends."""
        self.started[action] = self.now
        if action.op is Op.F:
            self.held[rank] += 1
            self.forwards[rank] += 1
        if action.op is Op.B or action.op is Op.I:
            self.backwards[rank] += 1
        if action.op is Op.B or action.op is Op.W:
            self.held[rank] -= 1
        end = self.now + self.duration(action)
        self.wake_at(end)
        return end

    def advance(self) -> bool:
        """Go to the next time at which something may change; return False if there is none."""
        while self._alarms and self._alarms[0] <= self.now * (1 + _ROUNDING):
            heapq.heappop(self._alarms)
        if not self._alarms:
            return False
        self.now = heapq.heappop(self._alarms)
        return True


Urgency = Callable[[Clock, int, Action], tuple[float, ...] | None]
"""Rates a ready action of a rank: the action with the lowest value starts first; None: it does not start now."""


def list_schedule(draft: Schedule, costs: StageCosts, urgency: Urgency, jitter: Jitter | None = None) -> Schedule:
    """Return ``draft`` with each rank's actions in the order in which they start.

    Args:
        draft: has every action on its rank, in any order.
        costs: durations for the simulation.
        urgency: the rule.
        jitter: random factors of the durations.

    Raises:
        ValueError: the rule starts nothing although actions are left.
    """
    clock = Clock(draft, costs, jitter)
    board = _Board(draft)
    busy_until = [0.0] * draft.ranks
    rows: list[list[Action]] = [[] for _ in range(draft.ranks)]
    left = sum(map(len, draft.actions))
    while left:
        before = left
        for rank in range(draft.ranks):
            if busy_until[rank] > clock.now * (1 + _ROUNDING):
                continue
            action = board.most_urgent(clock, rank, urgency)
            if action is not None:
                rows[rank].append(action)
                busy_until[rank] = clock.start(rank, action)
                board.release(clock, rank, action, busy_until[rank])
                left -= 1
        if (
            left == before and not clock.advance()
        ):  # an action that has started may allow others to start at the same time
            raise ValueError(f"{draft.name}: the rule starts none of {left} actions that are left")
    return replace(draft, actions=tuple(map(tuple, rows)))


class _Board:
    """Knows which actions are ready, and from which time on."""

    def __init__(self, draft: Schedule) -> None:
        self._draft = draft
        self._missing: dict[Action, int] = {}
        self._waiting: dict[Action, list[tuple[int, Action]]] = {}
        self._ready_at: dict[Action, float] = {}
        self._ready: list[list[Action]] = [[] for _ in range(draft.ranks)]
        for rank, row in enumerate(draft.actions):
            for action in row:
                needed = dependencies(draft, action)
                self._missing[action] = len(needed)
                self._ready_at[action] = 0.0
                for each in needed:
                    self._waiting.setdefault(each, []).append((rank, action))
                if not needed:
                    self._ready[rank].append(action)

    def most_urgent(self, clock: Clock, rank: int, urgency: Urgency) -> Action | None:
        """Remove and return the action that the rule starts on ``rank``, or None."""
        now = clock.now * (1 + _ROUNDING)
        rated = [
            (rate, action)
            for action in self._ready[rank]
            if self._ready_at[action] <= now and (rate := urgency(clock, rank, action)) is not None
        ]
        if not rated:
            return None
        _, action = min(rated)
        self._ready[rank].remove(action)
        return action

    def release(self, clock: Clock, rank: int, action: Action, end: float) -> None:
        """Note that ``action`` of ``rank`` ends at ``end``; actions that waited only for it become ready."""
        for other, waiting in self._waiting.get(action, ()):
            ready = end if other == rank else end + clock.latency(action, waiting.stage)
            self._ready_at[waiting] = max(self._ready_at[waiting], ready)
            self._missing[waiting] -= 1
            if not self._missing[waiting]:
                self._ready[other].append(waiting)
                clock.expect(other, self._ready_at[waiting])
