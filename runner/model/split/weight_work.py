"""The work of W: the nodes that a cut has left, in the order in which autograd would run them, and the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from runner.model.split.cut import Cut
from runner.model.split.graph import Edge, Graph, Node, is_leaf, order_of
from runner.model.split.weight_formulas import Formula

__all__ = ["Part", "Parts", "Task", "accumulate", "note_made", "sum_of", "tasks_of"]

_TRANSPOSE = "TBackward0"


@dataclass(slots=True)
class Part:
    """What one node adds to the gradient that another one receives.

    Args:
        place: the order of the node that makes it, and which of its edges it is: autograd adds in ascending order.
        formula: makes the part from ``gradient``; None if ``gradient`` is the part itself.
        gradient: None until it is known, and if there is none.
    """

    place: tuple[int, int]
    formula: Formula | None = None
    gradient: Tensor | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether taking it makes a tensor that nobody else holds."""
        return self.formula is not None

    def take(self) -> Tensor | None:
        """The part, which is not kept."""
        gradient, formula = self.gradient, self.formula
        self.gradient = self.formula = None
        return gradient if gradient is None or formula is None else formula(gradient)


Parts = Mapping[Edge, Sequence[Part]]
"""What arrives at each edge from nodes of I."""


@dataclass(slots=True)
class _Transposed(Part):
    """The part of a weight's gradient that comes by way of the transposed weight, as in ``nn.Linear``.

    Args:
        arriving: the parts of the transposed weight's gradient.
    """

    arriving: Sequence[Part] = ()

    @property
    def is_fresh(self) -> bool:
        """See :class:`Part`."""
        return all(part.is_fresh for part in self.arriving)

    def take(self) -> Tensor | None:
        made, self.arriving = sum_of(self.arriving), ()
        return None if made is None else made.t()


@dataclass(slots=True)
class Task:
    """Weights, and what lies between them and I; nothing else of W leads there.

    Args:
        roots: the edges at which gradients arrive from I, with their parts.
        asked: the edges to the weights, by way of which autograd runs the nodes between; empty if there are none.
        leading: the last nodes, with the parts that they make by edge.
        weights: the weights, with the parts of their gradients.
    """

    roots: Parts
    asked: Sequence[Edge]
    leading: Mapping[Node, Mapping[int, Part]]
    weights: Sequence[tuple[Tensor, Sequence[Part]]]

    def run(self) -> None:
        """Add to the weights' gradients."""
        summed = {edge: sum_of(parts) for edge, parts in self.roots.items()}
        given = {edge: gradient for edge, gradient in summed.items() if gradient is not None}
        if given:
            for node, parts in self.leading.items():
                node.register_hook(partial(note_made, parts))
            asked = [GradientEdge(*edge) for edge in self.asked]
            roots, gradients = [GradientEdge(*edge) for edge in given], list(given.values())
            del summed, given
            torch.autograd.grad(roots, asked, gradients, allow_unused=True)
        for weight, parts_of_weight in self.weights:
            accumulate(weight, sum_of(parts_of_weight))


def tasks_of(made: Cut, parts: Parts) -> list[Task]:
    """The work of W, in the order in which autograd would begin with it.

    Args:
        made: the cut.
        parts: what I adds to the gradients of nodes of W.
    """
    arriving: dict[Node, dict[Edge, Sequence[Part]]] = {}
    for edge, found in parts.items():
        arriving.setdefault(edge[0], {})[edge] = found
    tasks = [_task_of(made.graph, nodes, arriving) for nodes in _separate(made)]
    return [task for _, task in sorted(tasks, key=lambda each: each[0])]


def _separate(made: Cut) -> list[list[Node]]:
    """The nodes of W, in groups that no edge connects."""
    groups: dict[Node, list[Node]] = {}
    for node in made.graph.order:
        if node in made.in_i:
            continue
        merged = [node]
        for group in {id(each): each for each in (groups[after] for after in made.graph.after(node))}.values():
            merged = group + merged
        groups.update(dict.fromkeys(merged, merged))
    return list({id(group): group for group in groups.values()}.values())


def _task_of(
    graph: Graph, nodes: Sequence[Node], arriving: Mapping[Node, Mapping[Edge, Sequence[Part]]]
) -> tuple[tuple[int, int], Task]:
    """The task of some nodes, and its place among the others."""
    weights: dict[Node, list[Part]] = {leaf: [] for leaf in nodes if is_leaf(leaf)}
    between = [node for node in nodes if node not in weights]
    for leaf, parts in weights.items():
        for found in arriving.get(leaf, {}).values():
            parts += found
    place = min(part.place for node in nodes for found in arriving.get(node, {}).values() for part in found)
    kept = [(leaf.variable, parts) for leaf, parts in weights.items()]
    if all(_is_transposed_weight(graph, node) for node in between):
        for node in between:
            ((_, found),) = arriving[node].items()
            weights[graph.after(node)[0]].append(_Transposed((order_of(node), 0), arriving=found))
        return place, Task({}, (), {}, kept)
    leading: dict[Node, dict[int, Part]] = {}
    asked: dict[Edge, None] = {}
    for node in between:
        for index, edge in enumerate(graph.edges[node]):
            if edge[0] in weights:
                part = leading.setdefault(node, {})[index] = Part((order_of(node), index))
                weights[edge[0]].append(part)
                asked[edge] = None
    roots = {edge: found for node in between for edge, found in arriving.get(node, {}).items()}
    return place, Task(roots, list(asked), leading, kept)


def _is_transposed_weight(graph: Graph, node: Node) -> bool:
    return type(node).__name__ == _TRANSPOSE and is_leaf(graph.edges[node][0][0])


def note_made(parts: Mapping[int, Part], made: Sequence[Tensor | None], given: object) -> None:
    """A hook after a node: note the gradients that it has made."""
    for index, part in parts.items():
        part.gradient = made[index]


def sum_of(parts: Sequence[Part]) -> Tensor | None:
    """The sum of the parts that there are, in autograd's order.

    A sum of many parts is made in place, so that beside it only one part is alive. The first part may be a tensor that
    others hold, too, unless a formula has made it here.
    """
    total: Tensor | None = None
    is_own = False
    for part in sorted(parts, key=lambda each: each.place):
        total, is_own = _with_part(total, part, is_own=is_own)
    return total


def _with_part(total: Tensor | None, part: Part, *, is_own: bool) -> tuple[Tensor | None, bool]:
    """A sum with one more part, and whether nobody else holds it; ``is_own``: whether that is so of the sum so far.

    A sum of sparse gradients is never made in place.
    """
    is_fresh, value = part.is_fresh, part.take()
    if value is None or total is None:
        return (total, is_own) if value is None else (value, is_fresh)
    can = is_own and total.layout is torch.strided and value.layout is torch.strided
    return (total.add_(value) if can else total + value), True


def accumulate(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient as autograd does: in place, so that ``grad`` may be a view of a larger buffer."""
    if gradient is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif gradient.is_sparse:
        leaf.grad = gradient.clone()
    else:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)  # a copy, because other leaves may share the gradient
