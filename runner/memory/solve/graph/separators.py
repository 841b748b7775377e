"""An order that cuts a stage at small separators, again and again, and keeps nothing else.

The layers of a stage in their order are a path decomposition of its graph: the bag between two layers has the tensors
that later layers need of earlier ones, and the largest bag is the width. A bag near the middle separates the stage into
two parts. The part behind it runs backward first, from the bag alone; then the part before it, from its own beginning;
and each part is cut in the same way. So at any moment one bag for each cut around the part is alive. A part is at most
two thirds of the one around it, and for n layers and w bytes of the widest bag that is a multiple of w log n.

Source: Kumar, Purohit, Svitkina, Vee, Wang 2019, Efficient Rematerialization for Deep Networks, who give the bound for
tree decompositions. A path is the tree here, because layers run in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import ceil, log

from runner.memory.solve.graph.stage import StageGraph
from runner.memory.solve.graph.values import Order

__all__ = ["bags", "deepest", "separated_order"]


def bags(stage: StageGraph) -> list[int]:
    """The bytes of the tensors that layers behind each layer need of it and of those before; the last needs none."""
    values, count = stage.graph.values, stage.num_layers
    found = [0] * (count + 1)
    for index in stage.storages:
        users = [stage.layers[user] for user in stage.graph.users[index] if user < stage.num_forward]
        for at in range(stage.layers[index], max(users, default=0)):
            found[at] += values[index].num_bytes
    return found


def deepest(stage: StageGraph) -> int:
    """A number of cuts around each other after which every part is a single layer."""
    return max(1, ceil(log(stage.num_layers + 1, 1.5)))


def separated_order(stage: StageGraph, depth: int) -> Order:
    """The order in which parts are cut ``depth`` times; those that are not cut any more keep their graphs.

    Args:
        stage: the stage.
        depth: 0 keeps everything; see :func:`deepest`.
    """
    parts = _Parts(stage)
    return (*range(stage.num_forward), *parts.backward(0, max(stage.layers), depth, is_there=True))


class _Parts:
    """Writes the backwards of parts of a stage; the loss is the layer behind the last."""

    def __init__(self, stage: StageGraph) -> None:
        self._bags = bags(stage)
        self._results: dict[int, list[int]] = defaultdict(list)
        self._graphs: dict[int, list[int]] = defaultdict(list)
        for index in range(stage.num_forward):
            is_graph = index not in stage.storages and not stage.graph.values[index].is_run
            (self._graphs if is_graph else self._results)[stage.layers[index]].append(index)
        self._backward = {stage.layers[run]: value for run, value in stage.graph.backward.items()}

    def backward(self, first: int, last: int, depth: int, *, is_there: bool) -> Iterator[int]:
        """The values of a part's backward.

        Args:
            first, last: its layers.
            depth: how often it is cut.
            is_there: whether all of its forward has just run.
        """
        if depth == 0 or first == last:
            if not is_there:
                yield from self._forward(range(first, last + 1), with_graphs=True)
            yield from (self._backward[at] for at in range(last, first - 1, -1))
            return
        middle = self._separator(first, last)
        if not is_there:
            yield from self._forward(range(first, middle + 1), with_graphs=False)
        yield from self.backward(middle + 1, last, depth - 1, is_there=is_there)
        yield from self.backward(first, middle, depth - 1, is_there=False)

    def _forward(self, layers: Sequence[int], *, with_graphs: bool) -> Iterator[int]:
        for at in layers:
            yield from self._results[at]
            yield from self._graphs[at] if with_graphs else ()

    def _separator(self, first: int, last: int) -> int:
        """The layer behind which a part is cut: of those in its middle third, the one with the smallest bag."""
        third = (last - first) // 3
        middle = (first + last) / 2
        inner = range(first + third, max(first + third + 1, last - third))
        return min(inner, key=lambda at: (self._bags[at], abs(at + 0.5 - middle)))
