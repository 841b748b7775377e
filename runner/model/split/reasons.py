"""Says which weights' gradients I makes although stages wait for it, and why W cannot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from runner.model.split.cut import Cut, cut
from runner.model.split.graph import Graph, Node, is_behind_hooks, is_leaf
from runner.model.split.weight_formulas import FACTORS

__all__ = ["Kept", "kept_in_input", "waiting_weights"]


class Kept(NamedTuple):
    """A weight of which I makes a gradient.

    Args:
        weight: the weight.
        reason: why W cannot make it.
        in_one_piece: a function of the user's makes it together with that of the input, even if only one is asked for.
    """

    weight: Tensor
    reason: str
    in_one_piece: bool


def kept_in_input(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Kept]:
    """The weights of which I makes a gradient with two or more axes.

    Gradients with one axis, of biases and norms, take next to no time.

    Args:
        outputs, inputs: tensors of a stage or a layer, as for :func:`runner.model.split.backward.backward_input`.
            Without inputs nothing waits for I, and the list is empty.
    """
    if not outputs or not inputs:
        return []
    graph = Graph(outputs)
    given = {id(tensor) for tensor in inputs}
    leaves = [leaf for leaf in graph.leaves if id(leaf.variable) in given]
    if graph.is_reentrant:
        reason = "a re-entrant activation checkpoint runs its backward in one piece"
        own = [leaf.variable for leaf in graph.leaves if leaf not in leaves]
        return [Kept(weight, reason, True) for weight in own if weight.dim() > 1]
    made = cut(graph, leaves)
    found: dict[int, Kept] = {}
    for node, below in _joins(made):
        for weight in _weights_behind(graph, below):
            kept = Kept(weight, _reason(made, node, below), isinstance(node, BackwardCFunction))
            found.setdefault(id(weight), kept)
    return list(found.values())


def waiting_weights(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The weights whose gradients I makes, whatever their number of axes.

    The gradients are alive until the whole stage's I has ended. A re-entrant checkpoint adds each at once.

    Args:
        outputs, inputs: tensors as for :func:`kept_in_input`, which may have no inputs.
    """
    if not outputs:
        return []
    graph = Graph(outputs)
    if graph.is_reentrant:
        return []
    given = {id(tensor) for tensor in inputs}
    made = cut(graph, [leaf for leaf in graph.leaves if id(leaf.variable) in given])
    return [leaf.variable for leaf in graph.leaves if leaf in made.in_i and id(leaf.variable) not in given]


def _joins(made: Cut) -> Iterator[tuple[Node, Node]]:
    """The nodes that I runs and behind which an input lies, with nodes behind which none lies."""
    left = {(each.above, each.edge) for found in made.crossings.values() for each in found if each.formula is not None}
    for node in made.graph.order:
        if node in made.own and node not in made.graph.roots:
            continue
        for index, (below, number) in enumerate(made.graph.edges[node]):
            if below in made.own and (node, index) not in left and _num_axes(below, number) > 1:
                yield node, below


def _num_axes(node: Node, number: int) -> int:
    """The axes of the gradient that a node receives, without those of length 1."""
    shape = node.variable.shape if is_leaf(node) else node._input_metadata[number].shape
    return sum(length > 1 for length in shape)


def _weights_behind(graph: Graph, node: Node) -> list[Tensor]:
    todo, seen = [node], {node: None}
    while todo:
        fresh = [each for each in graph.after(todo.pop()) if each not in seen]
        seen |= dict.fromkeys(fresh)
        todo += fresh
    return [each.variable for each in seen if is_leaf(each)]


def _reason(made: Cut, node: Node, below: Node) -> str:
    name = type(node).__name__.removesuffix("0").removesuffix("Backward")
    if type(node).__name__ in FACTORS and is_behind_hooks(node):
        return f"what {name} saved is computed again, or was moved elsewhere"
    if below not in made.in_i or is_leaf(below):
        hooks = is_leaf(below) and below.variable._backward_hooks
        return "it has a hook" if hooks else f"{name} takes it together with the layer's input"
    causes = "hooks, a function of its own with torch before 2.13, or an order of sums that only one backward has"
    return f"what lies between it and {name} cannot wait ({causes})"
