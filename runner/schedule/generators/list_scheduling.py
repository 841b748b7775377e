"""List scheduling: whenever a rank is free, it starts the most urgent of the actions that are ready.

The result is the order alone. It is found by playing the draft with given durations, so that who draws or runs it with
other durations has the same order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace

from runner.schedule.dependencies import dependencies
from runner.schedule.simulation.clock import Jitter, StageCosts, durations
from runner.schedule.values import Action, Op, Schedule

__all__ = ["Clock", "Urgency", "list_schedule"]

_ROUNDING = 1e-9  # of the time that a wait is compared with


class Clock:
    """What a rule may look at while the order is made.

    Attributes:
        now: the moment.
        started: when each action began.
        held: per rank, forwards without their B or W.
        forwards: per rank, F that have begun.
        backwards: per rank, B or I that have begun.
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
        """Time that ``action`` takes."""
        chance = 1.0 if self._jitter is None else self._jitter.factor(action)
        return self._durations[action.work][action.stage] * chance

    def latency(self, made: Action, stage: int) -> float:
        """Time of the message that brings what an action made to a neighbouring stage of another rank."""
        chance = 1.0 if self._jitter is None else self._jitter.factor(made, message=True)
        return self._durations[Op.SEND][min(made.stage, stage)] * chance

    def next_arrival(self, rank: int) -> float:
        """When the next action of ``rank`` becomes ready that something running now makes ready."""
        arrivals = self._arrivals[rank]
        while arrivals and arrivals[0] <= self.now * (1 + _ROUNDING):
            heapq.heappop(arrivals)
        return arrivals[0] if arrivals else float("inf")

    def wake_at(self, moment: float) -> None:
        """Ask all idle ranks again then."""
        heapq.heappush(self._alarms, moment)

    def expect(self, rank: int, moment: float) -> None:
        """An action of ``rank`` becomes ready at ``moment``."""
        heapq.heappush(self._arrivals[rank], moment)
        self.wake_at(moment)

    def start(self, rank: int, action: Action) -> float:
        """Count an action in; when it ends."""
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
        """Go on to the next moment at which something may change; False where there is none."""
        while self._alarms and self._alarms[0] <= self.now * (1 + _ROUNDING):
            heapq.heappop(self._alarms)
        if not self._alarms:
            return False
        self.now = heapq.heappop(self._alarms)
        return True


Urgency = Callable[[Clock, int, Action], tuple[float, ...] | None]
"""Of a ready action on a rank: the least is started first; None: not now."""


def list_schedule(draft: Schedule, costs: StageCosts, urgency: Urgency, jitter: Jitter | None = None) -> Schedule:
    """``draft`` with each rank's actions in the order in which they were started.

    Args:
        draft: every action on its rank, in any order.
        costs: durations to play it with.
        urgency: the rule.
        jitter: what the durations are multiplied by.

    Raises:
        ValueError: the rule lets nothing start although actions are left.
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
        if left == before and not clock.advance():  # what has started may let others start at the same moment
            raise ValueError(f"{draft.name}: the rule starts none of {left} actions that are left")
    return replace(draft, actions=tuple(map(tuple, rows)))


class _Board:
    """Which actions are ready, and from when."""

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
        """Take the action that the rule wants started on ``rank``."""
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
        """``action`` of ``rank`` ends at ``end``: whoever waited for it last becomes ready."""
        for other, waiting in self._waiting.get(action, ()):
            ready = end if other == rank else end + clock.latency(action, waiting.stage)
            self._ready_at[waiting] = max(self._ready_at[waiting], ready)
            self._missing[waiting] -= 1
            if not self._missing[waiting]:
                self._ready[other].append(waiting)
                clock.expect(other, self._ready_at[waiting])
