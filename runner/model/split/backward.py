"""The backward of a stage in two parts: I computes the gradient of its input, W later the gradients of its weights.

The autograd graph of the stage is walked from its outputs. The gradient of a weight is left to W if only products use
the weight (matrix products, convolutions, embeddings: :mod:`runner.model.split.weight_formulas`), directly or through
views: I captures the gradients of these products' outputs, and W needs only them and the products' other operands. I
computes everything else: the gradients for which the stages before wait, and the gradients of biases, norms and
operators without a known formula, which cost little or could be left to W only by computing something twice.

Both parts together compute each product once and give the same bits as one full backward, because I is one run of
torch's engine without some edges, and the contributions to a weight are summed in the engine's order, which is the
reverse order of the forward. After I the graph is gone, and what only I needed is freed.

A stage whose input requires no gradients (the first one) is split at the same places: its I goes back to the output of
its first product with a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runner.model.split.weight_formulas import WEIGHT_OPERANDS, Formula

__all__ = ["PendingWeights", "backward_input", "backward_weight"]

_Node: TypeAlias = Any  # an autograd node; torch has a class for each operator

_ACCUMULATE = "AccumulateGrad"
_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
_TRANSPOSE = "TBackward0"
_VIEWS = frozenset(
    {
        "AliasBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
        "SelectBackward0", "SliceBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2", "TBackward0",
        "ToCopyBackward0", "TransposeBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
    }
)  # fmt: skip
"""Nodes through which a weight may reach its product: they move or convert elements and save no tensors."""


@dataclass(slots=True)
class _Contribution:
    """The part of a weight's gradient that comes from one product.

    Args:
        formula: computes the gradient of the operand from that of the product's output.
        views: nodes from the operand to the weight, without the node of the weight itself.
        place: sort key; ascending order is the order in which autograd would add the parts.
        gradient: gradient of the product's output, once I has captured it; None if there is none.
    """

    formula: Formula
    views: tuple[_Node, ...]
    place: tuple[int, int]
    gradient: Tensor | None = None

    def compute(self, weight: Tensor) -> Tensor | None:
        """The gradient of the weight."""
        if self.gradient is None:
            return None
        made = self.formula(self.gradient)
        if not self.views:
            return made
        if [type(node).__name__ for node in self.views] == [_TRANSPOSE]:
            return made.t()
        return torch.autograd.grad([GradientEdge(self.views[0], 0)], [weight], [made])[0]


class PendingWeights:
    """The gradients of weights that :func:`backward_input` has left to :func:`backward_weight`."""

    def __init__(self, contributions: Sequence[tuple[Tensor, list[_Contribution]]] = ()) -> None:
        self._left = list(contributions)[::-1]

    def __len__(self) -> int:
        """The number of weights that wait."""
        return len(self._left)

    def pop(self) -> tuple[Tensor, list[_Contribution]]:
        """Remove and return the next weight, with the parts of its gradient."""
        return self._left.pop()


def backward_input(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], PendingWeights]:
    """Run I: return the gradients of ``inputs``, and add those of weights that are not left to W to their ``grad``.

    As after a full backward, the graph cannot be used again.

    Args:
        outputs: tensors that require gradients.
        output_gradients: a gradient for each output; None if the outputs are scalars.
        inputs: distinct leaves that require gradients. Their ``grad`` is not changed.

    Returns:
        the inputs' gradients, None for an input on which no output depends, and the work of W. Hooks on weights run
        once, in I or in W; hooks after accumulation (``register_post_accumulate_grad_hook``) do not run.
    """
    if not outputs:
        return [None] * len(inputs), PendingWeights()
    graph = _Graph(outputs)
    if graph.is_reentrant:
        return _all_at_once(outputs, output_gradients, inputs), PendingWeights()
    given = {id(tensor) for tensor in inputs}
    own = {leaf for leaf in graph.leaves if id(leaf.variable) in given}
    deferred = _deferred(graph, own)
    kept = [node.variable for node in graph.leaves if node not in own and node not in deferred]
    products = list(dict.fromkeys(node for found in deferred.values() for node, _ in found))
    captured = [GradientEdge(node, 0) for node in products]
    wanted: list[Any] = [*inputs, *kept, *captured]
    if not wanted:
        return [], PendingWeights()
    gradients = torch.autograd.grad(outputs, wanted, output_gradients, allow_unused=True)
    with torch.no_grad():
        for leaf, gradient in zip(kept, gradients[len(inputs) :], strict=False):
            _accumulate(leaf, gradient)
    of_product = dict(zip(products, gradients[len(inputs) + len(kept) :], strict=True))
    for found in deferred.values():
        for node, contribution in found:
            contribution.gradient = of_product[node]
    pending = [(leaf.variable, [contribution for _, contribution in found]) for leaf, found in deferred.items()]
    return list(gradients[: len(inputs)]), PendingWeights(pending)


def backward_weight(pending: PendingWeights) -> None:
    """Run W: add the gradients that I has left to the weights' ``grad``, and free the tensors that they needed."""
    with torch.no_grad():
        while pending:
            weight, contributions = pending.pop()
            total: Tensor | None = None
            for contribution in contributions:
                part = contribution.compute(weight)
                if part is not None:
                    total = part if total is None else total + part
            _accumulate(weight, total)


def _accumulate(leaf: Tensor, gradient: Tensor | None) -> None:
    """Add a gradient as autograd does: in place, so that ``grad`` may be a view of a larger buffer."""
    if gradient is None:
        return
    if leaf.grad is not None:
        leaf.grad.add_(gradient)
    elif gradient.is_sparse:
        leaf.grad = gradient.clone()
    else:
        leaf.grad = torch.empty_like(leaf).copy_(gradient)  # a copy, because other leaves may share the gradient


def _all_at_once(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run the whole backward, for re-entrant checkpoints: their inner backward cannot be limited to some tensors."""
    before = [leaf.grad for leaf in inputs]
    for leaf in inputs:
        leaf.grad = None
    torch.autograd.backward(outputs, output_gradients)
    made = [leaf.grad for leaf in inputs]
    for leaf, gradient in zip(inputs, before, strict=True):
        leaf.grad = gradient
    return made


class _Graph:
    """The autograd graph of some outputs.

    Attributes:
        leaves: nodes that accumulate into leaves.
        products: nodes for which formulas may be known.
        uses: number of edges that lead to each node.
        is_reentrant: whether it contains a re-entrant activation checkpoint.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.leaves: list[_Node] = []
        self.products: list[_Node] = []
        self.uses: dict[_Node, int] = {}
        self.is_reentrant = False
        todo: list[_Node] = []
        self._enter([(get_gradient_edge(output).node, 0) for output in outputs], todo)
        while todo:
            self._enter(todo.pop().next_functions, todo)

    def _enter(self, edges: Iterable[tuple[_Node | None, int]], todo: list[_Node]) -> None:
        """Count the edges to each node; new inner nodes are added to ``todo``."""
        for node, _ in edges:
            if node is None:
                continue
            if node in self.uses:
                self.uses[node] += 1
                continue
            self.uses[node] = 1
            name = type(node).__name__
            if name == _ACCUMULATE:
                self.leaves.append(node)
                continue
            if name in WEIGHT_OPERANDS:
                self.products.append(node)
            elif name == _REENTRANT_CHECKPOINT:
                self.is_reentrant = True
            todo.append(node)


def _deferred(graph: _Graph, inputs: set[_Node]) -> dict[_Node, list[tuple[_Node, _Contribution]]]:
    """The leaves that wait for W, each with its products in the order in which autograd would add their parts.

    A leaf waits only if all of its uses can wait, because its gradient is one sum.
    """
    found: dict[_Node, list[tuple[_Node, _Contribution]]] = defaultdict(list)
    for product in graph.products:
        operands = product.next_functions
        for operand, read_formula in WEIGHT_OPERANDS[type(product).__name__].items():
            leaf, views = _weight_below(graph, operands[operand][0])
            if leaf is None or leaf in inputs or leaf.variable._backward_hooks:
                continue
            formula = read_formula(product)
            if formula is not None:
                last = views[-1] if views else product
                contribution = _Contribution(formula, views, (-last._sequence_nr(), operand))
                found[leaf].append((product, contribution))
    return {
        leaf: sorted(uses, key=lambda use: use[1].place)
        for leaf, uses in found.items()
        if len(uses) == graph.uses[leaf]
    }


def _weight_below(graph: _Graph, node: _Node | None) -> tuple[_Node | None, tuple[_Node, ...]]:
    """The leaf behind an operand, with the views between them, which nothing else may use; None if there is none."""
    views: list[_Node] = []
    while node is not None and type(node).__name__ != _ACCUMULATE:
        if graph.uses[node] > 1 or not _is_passed(node):
            return None, ()
        views.append(node)
        node = node.next_functions[0][0]
    return node, tuple(views)


def _is_passed(node: _Node) -> bool:
    """Whether a weight reaches its product through ``node`` without being needed by anything else.

    This holds for views, and for a :class:`torch.autograd.Function` that takes only the weight and saves no tensors,
    whose backward can run in W.
    """
    if type(node).__name__ in _VIEWS:
        return True
    of_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    return of_function and not node._raw_saved_tensors and all(other is None for other, _ in node.next_functions[1:])
