"""An order that follows from running a graph in given memory and evicting values when it is full.

Before each computation, values that were evicted and are needed are computed again, and those with the least score are
evicted until there is room. It needs no solver, and of what comes it knows only which values are never used again.

Source: Kirisame et al. 2021, Dynamic Tensor Rematerialization, and the scores of the authors' simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from runner.memory.solve.arena import Arena
from runner.memory.solve.graph.values import Graph, Order

__all__ = ["SCORES", "Forward", "evicting_order"]


def evicting_order(
    graph: Graph,
    budget: int,
    *,
    score: str = "full",
    forward: Forward | None = None,
    patience: int = 1000,
    arena: Arena[int] | None = None,
    side_by_side: bool = True,
) -> Order | None:
    """The order in which values are computed in so much memory; None if there is no room for one of them.

    Args:
        graph: the graph.
        budget: the most bytes of values that are alive at once.
        score: a key of :data:`SCORES`.
        forward: what is known of the values that are a stage's forward; None = the graph has none.
        patience: how many computations for each value, on average, before it counts as one without room.
        arena: memory in one piece in which all values lie; None = only bytes are counted, wherever they lie.
        side_by_side: whether those values of an arena are evicted that lie side by side, and not those of least score.
    """
    plain = graph, budget, SCORES[score], forward or Forward(0, budget), patience
    run = _Run(*plain) if arena is None else _RunInArena(*plain, arena, side_by_side)
    try:
        for index in graph.once:
            run.compute(index)
            run.forget(index)
    except _NoRoomError:
        return None
    return tuple(run.order)


@dataclass(frozen=True, slots=True)
class Forward:
    """The first values of a graph as the forward of a stage, which runs once before all others.

    Only they are evicted, and none of them before the forward has used it for the last time.

    Args:
        count: the number of values; 0 = the graph has no such forward, and every value may be evicted at any time.
        budget: the most bytes of values that are alive at once while it runs for the first time.
        kept: the values among them that are never evicted.
    """

    count: int
    budget: int
    kept: frozenset[int] = frozenset()


class _NoRoomError(Exception):
    """Everything that is alive is needed for the computation that has no room."""


class _Run:
    """The state of a run: what is alive, what was evicted, and a clock that counts seconds of computation."""

    def __init__(
        self, graph: Graph, budget: int, score: Callable[[_Run, int], float], forward: Forward, patience: int
    ) -> None:
        self.graph, self._budget, self.score, self._forward = graph, budget, score, forward
        self.order: list[int] = []
        self.evicted: set[int] = set()
        self.clock = 0.0
        self.last_use: dict[int, float] = {}
        self._alive: set[int] = set()
        self._running = -1  # the run whose results may be computed without running it again
        self._locked: dict[int, int] = {}  # value -> computations under way that need it
        self._left = {index: len(users) for index, users in enumerate(graph.users)}  # users that have not run yet
        self._again_limit = patience * len(graph.values)

    def compute(self, index: int) -> None:
        """Compute a value, and before it those of its inputs that were evicted."""
        if len(self.order) > self._again_limit:
            raise _NoRoomError  # it evicts what it has just computed, for ever
        value = self.graph.values[index]
        for need in value.needs:
            self._locked[need] = self._locked.get(need, 0) + 1
        try:
            while missing := [need for need in value.needs if not self._is_there(need)]:
                self.compute(missing[0])
            self.make_room(index)
        finally:
            for need in value.needs:
                self._locked[need] -= 1
        self.clock += value.seconds
        if value.is_run:
            self._running = index
        elif self._running not in value.needs:
            self._running = -1
        self._alive.add(index)
        self.evicted.discard(index)
        self.last_use |= dict.fromkeys((index, *value.needs), self.clock)
        self.order.append(index)

    def _is_there(self, index: int) -> bool:
        return index == self._running if self.graph.values[index].is_run else index in self._alive

    def forget(self, index: int) -> None:
        """Evict what no value that is still to come uses, after the first computation of a value."""
        for need in set(self.graph.values[index].needs):
            self._left[need] -= 1
        for each in {index, *self.graph.values[index].needs}:
            if not self._left[each] and each in self._alive:
                self.evict(each)

    def make_room(self, index: int) -> None:
        """Evict values until one can be computed."""
        begins = len(self.order) < self._forward.count
        budget = self._forward.budget if begins else self._budget
        more = self.graph.values[index].num_bytes + self.graph.values[index].transient_bytes
        while sum(self.graph.values[each].num_bytes for each in self._alive) + more > budget:
            self.evict(self.least())

    def least(self) -> int:
        """The value with the least score of those that may go."""
        free = [each for each in self._alive if self.may_go(each)]
        if not free:
            raise _NoRoomError
        return min(free, key=lambda each: (self.score(self, each), each))

    def may_go(self, index: int) -> bool:
        """Whether a value may be evicted."""
        if self._locked.get(index) or not self.graph.values[index].num_bytes:
            return False
        count, now = self._forward.count, len(self.order)
        if not count:
            return True
        is_needed = any(now <= user < count for user in self.graph.users[index])
        return index < count and index not in self._forward.kept and not is_needed

    def evict(self, index: int) -> None:
        """Keep a value no longer."""
        self._alive.discard(index)
        self.evicted.add(index)

    def staleness(self, index: int) -> float:
        """Seconds of computation since a value was used."""
        return max(self.clock - self.last_use[index], 1e-9)

    def neighbourhood(self, index: int) -> float:
        """Seconds of the evicted values that must be computed again before this one or, without it, for others."""
        before = self._reached(index, lambda each: self.graph.values[each].needs)
        behind = self._reached(index, lambda each: self.graph.users[each])
        return sum(self.graph.values[each].seconds for each in before | behind)

    def _reached(self, index: int, near: Callable[[int], Iterable[int]]) -> set[int]:
        found: set[int] = set()
        waiting = [index]
        while waiting:
            for each in near(waiting.pop()):
                if each in self.evicted and each not in found:
                    found.add(each)
                    waiting.append(each)
        return found


class _RunInArena(_Run):
    """A run whose values lie in an arena; what a computation takes besides lies behind its result until it is over."""

    def __init__(
        self,
        graph: Graph,
        budget: int,
        score: Callable[[_Run, int], float],
        forward: Forward,
        patience: int,
        arena: Arena[int],
        side_by_side: bool,
    ) -> None:
        super().__init__(graph, budget, score, forward, patience)
        self._arena, self._side_by_side = arena, side_by_side

    def compute(self, index: int) -> None:
        """See :class:`_Run`."""
        super().compute(index)
        self._arena.shrink(index, self.graph.values[index].num_bytes)

    def make_room(self, index: int) -> None:
        """See :class:`_Run`."""
        value = self.graph.values[index]
        more = value.num_bytes + value.transient_bytes
        while not self._arena.place(index, more, from_end=self._is_dear(index)):
            found = self._arena.window(more, self._cost) if self._side_by_side else [self.least()]
            if not found:
                raise _NoRoomError
            for each in found:
                self.evict(each)

    def evict(self, index: int) -> None:
        """See :class:`_Run`."""
        super().evict(index)
        self._arena.remove(index)

    def _cost(self, index: int) -> float | None:
        """The score of a value, as if bytes were no matter; None if it must stay."""
        return self.score(self, index) * self.graph.values[index].num_bytes if self.may_go(index) else None

    def _is_dear(self, index: int) -> bool:
        """Whether a value is never evicted; such values lie at the end, so that they are not between others."""
        return self._side_by_side and not self.may_go(index)


def _full(run: _Run, index: int) -> float:
    value = run.graph.values[index]
    return (value.seconds + run.neighbourhood(index)) / (max(1, value.num_bytes) * run.staleness(index))


def _local(run: _Run, index: int) -> float:
    value = run.graph.values[index]
    return value.seconds / (max(1, value.num_bytes) * run.staleness(index))


SCORES: dict[str, Callable[[_Run, int], float]] = {
    "full": _full,
    "local": _local,
    "lru": lambda run, index: 1.0 / run.staleness(index),
    "size": lambda run, index: 1.0 / max(1, run.graph.values[index].num_bytes),
}
"""Scores by name; the value with the least is evicted. ``full``: seconds of the value and of its evicted neighbourhood,
by its bytes and the time since its last use; ``local``: its own seconds alone; ``lru``: the time since its last use;
``size``: its bytes."""
