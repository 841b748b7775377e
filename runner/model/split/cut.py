"""Decides which weights wait for W: where the graph of a stage is cut into I and W.

A weight's *own path* is what lies between the weight and the place where it first meets what depends on the stage's
input: a parametrization, weight normalisation, fake quantization, a sum of low rank, a function of the user's. Nothing
of it is needed for the gradient of the stage's input, so all of it can run in W.

A node belongs to W if no input of the stage lies behind it, and if everything behind it belongs to W too. All edges
from nodes of I to those of W are cut. Where the node above such an edge is a product with a known formula
(:mod:`runner.model.split.weight_formulas`), I does not compute the operand's gradient at all: W does so, from the
gradient of the product's output.

A stage without an input that requires gradients (the first one) cannot tell by its graph what depends on the data.
There, only operands of products are cut off: the one behind which no product with data lies or, if that holds for both,
the one that is nearer to its weights. No other stage waits for such an I, so this decides only how the work is shared
between I and W.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from runner.model.split.graph import Edge, Graph, Node, is_behind_hooks, is_leaf, is_view, order_of
from runner.model.split.weight_formulas import FACTORS, Formula, formulas_of

__all__ = ["Crossing", "Cut", "cut"]


_OWN_FUNCTIONS_LAST = torch.__version__ >= "2.13"
"""Whether the node of a function of the user's outlives the nodes above it; before, it ended with the last of them."""


class Crossing(NamedTuple):
    """An edge from a node of I to a node of W.

    Args:
        above: the node of I.
        edge: which of its edges.
        below: the node of W, and the number of the gradient that it receives.
        formula: makes this gradient from that of the output of ``above``; None if ``above`` makes it itself, in I.
    """

    above: Node
    edge: int
    below: Edge
    formula: Formula | None

    @property
    def place(self) -> tuple[int, int]:
        """Sort key; autograd adds what arrives at a node in ascending order."""
        return order_of(self.above), self.edge


@dataclass(slots=True)
class Cut:
    """A graph in two parts.

    Args:
        graph: the graph.
        own: the nodes behind which no input lies, each with its distance from the farthest weight behind it.
        in_i: the nodes of I; all others are in W.
        crossings: for each node of W, the edges that lead to it from nodes of I.
    """

    graph: Graph
    own: Mapping[Node, int]
    in_i: set[Node] = field(default_factory=set)
    crossings: dict[Node, list[Crossing]] = field(default_factory=dict)


def cut(graph: Graph, inputs: Sequence[Node]) -> Cut:
    """Cut the graph of a stage.

    Args:
        graph: the graph of its outputs.
        inputs: the leaves that are the stage's inputs.
    """
    own = _own(graph, frozenset(inputs))
    refused: set[Node] = set()
    while True:
        made = Cut(graph, own)
        torn = _divide(made, _able(graph, own, refused), has_inputs=bool(inputs)) or _out_of_order(made)
        if not torn:
            return made
        refused |= torn


def _own(graph: Graph, inputs: frozenset[Node]) -> dict[Node, int]:
    """The nodes behind which no input lies or, in a stage without inputs, no product with data."""
    own: dict[Node, int] = {}
    for node in graph.order:
        begins = node in inputs if inputs else _is_product_with_data(graph, node)
        after = graph.after(node)
        if not begins and all(each in own for each in after):
            own[node] = 1 + max((own[each] for each in after), default=-1)
    return own


def _is_product_with_data(graph: Graph, node: Node) -> bool:
    """Whether one operand of this product requires no gradient; of an embedding, the indices never do."""
    operands = FACTORS.get(type(node).__name__)
    if operands is None:
        return False
    return len(operands) == 1 or any(graph.edges[node][index][0] is None for index in operands)


def _able(graph: Graph, own: Mapping[Node, int], refused: set[Node]) -> set[Node]:
    """The nodes that could run in W: everything behind them can run there too."""
    able: set[Node] = set()
    for node in graph.order:
        if node in own and node not in refused and _can_wait(node) and able.issuperset(graph.after(node)):
            able.add(node)
    return able


def _can_wait(node: Node) -> bool:
    """Hooks on a weight run on its whole gradient, once; tensors behind hooks are unpacked in one run of autograd."""
    if isinstance(node, BackwardCFunction) and not _OWN_FUNCTIONS_LAST:
        return False
    return not node.variable._backward_hooks if is_leaf(node) else not is_behind_hooks(node)


def _divide(made: Cut, able: set[Node], *, has_inputs: bool) -> set[Node]:
    """Go from the outputs to the leaves, so that all nodes above a node are decided before it.

    Returns:
        nodes that must be in I although a node of W leads to them; if there are any, the cut is none.
    """
    under_w: set[Node] = set()
    torn: set[Node] = set()
    for node in reversed(made.graph.order):
        crossings = made.crossings.pop(node, [])
        if node in able and node not in made.graph.roots and _waits(made.graph, node, crossings, under_w, has_inputs):
            made.crossings[node] = crossings
            under_w.update(made.graph.after(node))
            continue
        made.in_i.add(node)
        if node in under_w:
            torn.add(node)
        for crossing in _edges_into(made, node, able, has_inputs=has_inputs):
            made.crossings.setdefault(crossing.below[0], []).append(crossing)
    return torn


def _out_of_order(made: Cut) -> set[Node]:
    """The nodes of W whose gradient W would sum in another order than one backward.

    What arrives from I comes first in W. Sums of two parts do not depend on their order. A weight is no problem either:
    its parts are added one by one.
    """
    of_w: dict[Edge, list[int]] = {}
    for node in made.graph.order:
        if node not in made.in_i:
            for edge in made.graph.edges[node]:
                of_w.setdefault(edge, []).append(order_of(node))
    found: set[Node] = set()
    for node, crossings in made.crossings.items():
        if is_leaf(node):
            continue
        for edge in {crossing.below for crossing in crossings} & of_w.keys():
            of_i = [order_of(crossing.above) for crossing in crossings if crossing.below == edge]
            if len(of_i) + len(of_w[edge]) > 2 and max(of_i) > min(of_w[edge]):
                found.add(node)
    return found


def _waits(graph: Graph, node: Node, crossings: Sequence[Crossing], under_w: set[Node], has_inputs: bool) -> bool:
    """Whether a node that can run in W does so.

    Where I makes the gradient that leads to a weight, the weight itself, and its views, have nothing to wait for.
    If I makes a part of it and nodes of W another one, I cannot be asked for its part: it would run those nodes too.
    """
    of_products = [crossing.formula is not None for crossing in crossings]
    if node in under_w or not has_inputs:
        return all(of_products)
    return any(of_products) or not _is_cheap(graph, node)


def _edges_into(made: Cut, node: Node, able: set[Node], *, has_inputs: bool) -> list[Crossing]:
    """The edges from a node of I to nodes that may be in W."""
    edges = [(index, edge) for index, edge in enumerate(made.graph.edges[node]) if edge[0] in able]
    factors = FACTORS.get(type(node).__name__, ())
    weights = [index for index, _ in edges if index in factors]
    if not has_inputs and len(weights) > 1:
        weights = [min(reversed(weights), key=lambda index: made.own[made.graph.edges[node][index][0]])]
    formulas = formulas_of(node, weights, [index for index, _ in edges])
    return [Crossing(node, index, edge, formulas.get(index)) for index, edge in edges]


def _is_cheap(graph: Graph, node: Node) -> bool:
    """Whether nothing but views lies between a node and the weight behind it."""
    while is_view(node):
        node = graph.edges[node][0][0]
    return is_leaf(node)
