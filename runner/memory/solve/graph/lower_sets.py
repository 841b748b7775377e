"""Keeps the boundaries of an increasing sequence of lower sets of the forward graph, and runs the rest again.

A lower set has with each value all from which it is computed; its boundary are the values that are used outside. Let
L_1 < ... < L_k be a sequence that ends with all values. The forward keeps the boundaries. The backward goes through the
parts L_i - L_{i-1} from the last to the first: it computes what was dropped of the part, and then the part's gradients.
The part of the last step is not dropped. A dynamic program over pairs of lower sets finds the sequence that computes
least again within a budget.

Source: Kusumoto, Inoue, Watanabe, Akiba, Koyama 2019, A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation. The bound of a part's peak is adapted to backwards that push gradients to several
values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.memory.solve.graph.values import Graph, Order, Value

__all__ = ["Sequences", "backwards_in_turn", "least_recomputation", "lower_sets", "order_of", "prefix_closures"]

_MOST_LOWER_SETS = 1000

Members = int
"""A set of values, as the bits of a number."""


def lower_sets(forward: Sequence[Value]) -> list[Members]:
    """All lower sets but the empty one, from the smallest to the largest.

    Raises:
        ValueError: there are more than 1,000 of them.
    """
    needs = [sum(1 << need for need in value.needs) for value in forward]
    found, newest = {0}, {0}
    while newest:
        newest = {
            members | 1 << index
            for members in newest
            for index in range(len(forward))
            if not members >> index & 1 and needs[index] & ~members == 0
        } - found
        found |= newest
        if len(found) > _MOST_LOWER_SETS:
            raise ValueError(f"the graph has more than {_MOST_LOWER_SETS} lower sets: use those of its values alone")
    return sorted(found - {0}, key=int.bit_count)


def prefix_closures(forward: Sequence[Value]) -> list[Members]:
    """For each value the lower set of all from which it follows, and the set of all values: the approximate variant."""
    closures: list[Members] = []
    for index, value in enumerate(forward):
        closures.append(1 << index | _union(closures[need] for need in value.needs))
    return sorted({*closures, (1 << len(forward)) - 1}, key=int.bit_count)


def least_recomputation(graph: Graph, count: int, sets: Sequence[Members], budget: int) -> Order | None:
    """The order of the sequence of lower sets that computes least again and whose parts stay within a budget.

    Args:
        graph: a training graph.
        count: the number of its forward values, which are its first.
        sets: the lower sets that may be used, from the smallest to the largest; the last has all values.
        budget: bytes.

    Returns:
        the order, or None if every sequence needs more.
    """
    sequence = Sequences(graph, count, sets).least(budget)
    return order_of(graph, count, sequence) if sequence is not None else None


class Sequences:
    """Sequences of lower sets of a graph, for any number of budgets.

    Args:
        graph, count, sets: see :func:`least_recomputation`.
    """

    def __init__(self, graph: Graph, count: int, sets: Sequence[Members]) -> None:
        self._whole = (1 << count) - 1
        parts = _Parts(graph, count)
        self._parts = {  # by lower set: the smaller ones, with the part between
            members: [
                (smaller, parts.between(smaller, members))
                for smaller in (0, *sets)
                if smaller != members and smaller & ~members == 0
            ]
            for members in sets
        }

    def least(self, budget: int) -> tuple[Members, ...] | None:
        """The sequence that computes least again and whose parts stay within a budget; None if every one needs more."""
        labels: dict[Members, list[_Label]] = {0: [_Label(0.0, 0, ())]}
        for members, parts in self._parts.items():
            found = [
                _Label(label.seconds + part.again, label.kept + part.kept, (*label.sequence, members))
                for smaller, part in parts
                for label in labels[smaller]
                if label.kept + part.running <= budget
            ]
            labels[members] = _undominated(found)
        whole = labels.get(self._whole, [])
        return min(whole).sequence if whole else None


def order_of(graph: Graph, count: int, sequence: Sequence[Members]) -> Order:
    """The computations of a sequence of lower sets, of which the last has all values."""
    parts, smaller = [], 0
    for members in sequence:
        kept = _boundary(graph, count, members)
        part = [index for index in range(count) if (members & ~smaller) >> index & 1]
        parts.append((part, [index for index in part if not kept >> index & 1]))
        smaller = members
    backward = _backward_of(graph, count)
    order = [index for part, _ in parts for index in part]
    for number, (part, dropped) in reversed(list(enumerate(parts))):
        order += dropped if number < len(parts) - 1 else []
        order += [backward[index] for index in reversed(part) if index in backward]
    return tuple(order)


def backwards_in_turn(graph: Graph, count: int, sequence: Sequence[Members]) -> Order:
    """Like :func:`order_of`, for a forward in the order of the values, and backwards in the reverse of it.

    A part is computed again before the first backward of one of its values. If the parts are not one behind the other,
    several of them are there at once, and the peak may be above that of :func:`order_of`.
    """
    part_of: dict[int, list[int]] = {}  # value -> what was dropped of its part
    smaller = 0
    for members in sequence[:-1]:
        dropped = list(_indices(members & ~smaller & ~_boundary(graph, count, members)))
        part_of |= dict.fromkeys(_indices(members & ~smaller), dropped)
        smaller = members
    order, backward = list(range(count)), _backward_of(graph, count)
    for index in sorted(backward, key=lambda index: backward[index]):
        again = part_of.get(index, [])
        order += [*again, backward[index]]
        again.clear()  # the part's other values have the same list
    return tuple(order)


def _backward_of(graph: Graph, count: int) -> Mapping[int, int]:
    """For a forward value the value that runs its backward."""
    return graph.backward or {index: 2 * count - 1 - index for index in range(count)}


@dataclass(frozen=True, slots=True, order=True)
class _Label:
    """A sequence of lower sets: the seconds that it computes again, and the bytes that it keeps."""

    seconds: float
    kept: int
    sequence: tuple[Members, ...]


class _Part(NamedTuple):
    """The values of a lower set that a smaller one does not have.

    Args:
        running: the most bytes that are alive while it runs backward, without what earlier parts keep.
        kept: the bytes of its boundary, which the forward keeps.
        again: the seconds of what it computes again.
    """

    running: int
    kept: int
    again: float


class _Parts:
    """Measures parts by the bytes and seconds of the forward values, and of their gradients."""

    def __init__(self, graph: Graph, count: int) -> None:
        self._graph, self._count = graph, count
        self._forward = graph.values[:count]
        backward = _backward_of(graph, count)
        behind = [graph.values[backward[index]] if index in backward else None for index in range(count)]
        self._gradients = [each.num_bytes if each is not None else 0 for each in behind]
        self._besides = [
            max(value.transient_bytes, each.transient_bytes if each is not None else 0)
            for value, each in zip(self._forward, behind, strict=True)
        ]
        self._known: dict[Members, tuple[Members, int]] = {}

    def between(self, smaller: Members, members: Members) -> _Part:
        """The part between two lower sets.

        While it runs backward, what is alive besides what earlier parts keep are the part itself, its gradients, and
        the gradients that later parts have left to values up to it.
        """
        kept, left = self._border(members)
        part = list(_indices(members & ~smaller))
        running = sum(self._forward[index].num_bytes + self._gradients[index] for index in part) + left
        running += max(self._besides[index] for index in part)
        is_last = members == (1 << self._count) - 1
        again = sum(self._forward[index].seconds for index in part if not is_last and not kept >> index & 1)
        return _Part(running, sum(self._forward[index].num_bytes for index in part if kept >> index & 1), again)

    def _border(self, members: Members) -> tuple[Members, int]:
        """The boundary of a lower set, and bytes of the gradients that values outside leave to it."""
        if members not in self._known:
            boundary = _boundary(self._graph, self._count, members)
            self._known[members] = boundary, self._left_gradients(members)
        return self._known[members]

    def _left_gradients(self, members: Members) -> int:
        """Bytes of the gradients of values outside that were computed from values inside."""
        return sum(
            self._gradients[index]
            for index in range(self._count)
            if not members >> index & 1 and any(members >> need & 1 for need in self._forward[index].needs)
        )


def _boundary(graph: Graph, count: int, members: Members) -> Members:
    """The values of a lower set that forward values outside use."""
    return sum(
        1 << index
        for index in _indices(members)
        if any(user < count and not members >> user & 1 for user in graph.users[index])
    )


def _undominated(labels: list[_Label]) -> list[_Label]:
    """The labels for which no other one takes as little time and keeps as little."""
    found: list[_Label] = []
    for label in sorted(labels):
        if not found or label.kept < found[-1].kept:
            found.append(label)
    return found


def _indices(members: Members) -> Iterator[int]:
    while members:
        lowest = members & -members
        yield lowest.bit_length() - 1
        members ^= lowest


def _union(sets: Iterator[Members]) -> Members:
    union = 0
    for members in sets:
        union |= members
    return union
