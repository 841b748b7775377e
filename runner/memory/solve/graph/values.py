"""A training step as a graph of values, and an order of computations with its cost.

An order may compute a value several times. A value is kept from its computation to its last use before it is computed
again, and dropped then. So an order says all: what is kept, what is dropped, and what is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

__all__ = ["Cost", "Graph", "Order", "Value", "kept_bytes", "last_uses", "replayed", "training_graph"]

Order = tuple[int, ...]
"""The values of a graph, by index, in the order in which they are computed."""


@dataclass(frozen=True, slots=True)
class Value:
    """The result of one operation.

    Args:
        seconds: the time to compute it.
        num_bytes: the bytes that it takes.
        needs: indices of the values from which it is computed, all of them smaller than its own.
        transient_bytes: what its computation takes besides, for as long as it runs.
        is_run: whether it stands for a computation with several results, which need it: it takes no bytes itself, and
            is run again whenever one of them is computed again.
        is_optional: whether it may never be computed. Such a run is none of its stage's, and is another way to the
            results of an ordinary one, see :attr:`Graph.instead`. Any other such value is computed in its own stage or
            never, and the run that needs it is its last use.
    """

    seconds: float
    num_bytes: int
    needs: tuple[int, ...] = ()
    transient_bytes: int = 0
    is_run: bool = False
    is_optional: bool = False


@dataclass(frozen=True)
class Graph:
    """Values in topological order. Each of them must be computed at least once, if it is not optional.

    Args:
        values: the values.
        ends: the last value of each stage. A stage computes its values for the first time, in order, and whatever it
            needs for them again. Empty = each value is a stage.
        backward: for a forward value the value that runs its backward, and that is computed once: autograd runs no
            backward again. Empty = those of :func:`training_graph`, which may be computed again like any other value.
        instead: for an optional run the run whose results it gives, too.
    """

    values: tuple[Value, ...]
    ends: tuple[int, ...] = ()
    backward: Mapping[int, int] = field(default_factory=dict, hash=False)
    instead: Mapping[int, int] = field(default_factory=dict, hash=False)

    @cached_property
    def stages(self) -> tuple[range, ...]:
        """The values that each stage computes for the first time."""
        ends = self.ends or tuple(range(len(self.values)))
        return tuple(range(before + 1, end + 1) for before, end in zip((-1, *ends), ends, strict=False))

    @cached_property
    def backwards(self) -> frozenset[int]:
        """The values that run a backward and are computed once."""
        return frozenset(self.backward.values())

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each value, the indices of those that are computed from it."""
        found: list[list[int]] = [[] for _ in self.values]
        for index, value in enumerate(self.values):
            for need in value.needs:
                found[need].append(index)
        return tuple(map(tuple, found))

    @cached_property
    def others(self) -> Mapping[int, tuple[int, ...]]:
        """For each run that has some, the optional runs with the same results."""
        found: dict[int, list[int]] = {}
        for other, run in self.instead.items():
            found.setdefault(run, []).append(other)
        return {run: tuple(others) for run, others in found.items()}

    @property
    def once(self) -> Order:
        """The order that computes every value once, and no optional one."""
        return tuple(index for index, value in enumerate(self.values) if not value.is_optional)


class Cost(NamedTuple):
    """The cost of an order.

    Args:
        seconds: the sum of all computations.
        peak_bytes: the most that is alive; a value and those from which it is computed are alive together.
    """

    seconds: float
    peak_bytes: int


def replayed(graph: Graph, order: Sequence[int]) -> Cost:
    """Compute the cost of an order.

    Raises:
        ValueError: a value is used before it is computed, or after it was dropped, or never computed.
    """
    if missing := set(graph.once) - set(order):
        raise ValueError(f"values {sorted(missing)} are never computed")
    last_use = last_uses(graph, order)
    alive: dict[int, int] = {}  # value -> the position of its last use before it is computed again
    seconds, held, peak = 0.0, 0, 0
    for position, index in enumerate(order):
        value = graph.values[index]
        seconds += value.seconds
        made = graph.instead.get(index, index)
        if made not in alive:
            held += value.num_bytes
        alive[made] = last_use[position]
        peak = max(peak, held + value.transient_bytes)
        for each in {made, *value.needs}:
            if each not in alive:
                raise ValueError(f"value {index} needs {each}, which is not there")
            if alive[each] <= position:
                held -= graph.values[each].num_bytes
                del alive[each]
    return Cost(seconds, peak)


def last_uses(graph: Graph, order: Sequence[int]) -> list[int]:
    """For each computation, the position at which its result is used last before it is computed again, or its own."""
    latest: dict[int, int] = {}
    found = [0] * len(order)
    for position in range(len(order) - 1, -1, -1):
        index = order[position]
        found[position] = latest.pop(graph.instead.get(index, index), position)
        for need in graph.values[index].needs:
            latest.setdefault(need, position)
    return found


def kept_bytes(graph: Graph, order: Order) -> int:
    """The bytes that an order keeps from the first stage to the second."""
    start = 1 + max(order.index(index) for index in graph.stages[0] if not graph.values[index].is_optional)
    latest = last_uses(graph, order)
    lasts = {index: latest[position] for position, index in enumerate(order[:start])}
    return sum(graph.values[index].num_bytes for index, last in lasts.items() if last >= start)


def training_graph(forward: Sequence[Value], *, backward_factor: float = 2.0) -> Graph:
    """The graph of a forward and its backward.

    The backward of a value is computed from the value, from those of which it was computed, and from the backwards of
    its users. Its result is the gradients of the values of which it was computed, or its own if there are none.

    Args:
        forward: the values of the forward, in topological order.
        backward_factor: seconds of a backward by those of its forward.
    """
    plain = Graph(tuple(forward))
    count = len(forward)
    gradients = []
    for index in range(count - 1, -1, -1):
        value = forward[index]
        behind = sorted(2 * count - 1 - user for user in plain.users[index])
        size = sum(forward[need].num_bytes for need in value.needs) or value.num_bytes
        gradients.append(Value(backward_factor * value.seconds, size, (*value.needs, index, *behind)))
    return Graph((*forward, *gradients))
