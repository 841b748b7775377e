"""The backward of a stage in two parts: I computes the gradient of its input, W later the gradients of its weights.

The autograd graph of the stage is cut (:mod:`runner.model.split.cut`). W has the products of weights with activations
(matrix products, convolutions, embeddings: :mod:`runner.model.split.weight_formulas`) and whatever lies between these
products and the weights: parametrizations, functions of the user's. I computes everything else: the gradients for which
the stages before wait, and the gradients of biases, norms and operators without a known formula, which cost little or
could be left to W only by computing something twice. The bias of a convolution waits with its weight, because torch
makes both gradients together.

Both parts together compute each gradient once and give the same bits as one full backward. I is one run of torch's
engine without some edges. W runs the other nodes in the engine's order, which is the reverse order of the forward, and
adds what arrives at a node in the order of those who made it. After I, what only I needed is freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runner.model.split.cut import Cut, cut
from runner.model.split.graph import Edge, Graph, Node
from runner.model.split.weight_work import Part, Parts, Task, accumulate, note_made, tasks_of

__all__ = ["PendingWeights", "backward_input", "backward_weight", "capturing"]


class PendingWeights:
    """The gradients of weights that :func:`backward_input` has left to :func:`backward_weight`."""

    def __init__(self, tasks: Sequence[Task] = ()) -> None:
        self._left = list(tasks)[::-1]

    def __len__(self) -> int:
        """The number of weights that wait."""
        return sum(len(task.weights) for task in self._left)

    def run(self) -> None:
        """Do the work, and free what each piece of it needed."""
        while self._left:
            self._left.pop().run()


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
    graph = Graph(outputs)
    if graph.is_reentrant:
        return _all_at_once(outputs, output_gradients, inputs), PendingWeights()
    given = {id(tensor) for tensor in inputs}
    made = cut(graph, [leaf for leaf in graph.leaves if id(leaf.variable) in given])
    kept = [leaf.variable for leaf in graph.leaves if leaf in made.in_i and id(leaf.variable) not in given]
    gradients, parts = _run_i(made, outputs, output_gradients, [*inputs, *kept])
    with torch.no_grad():
        for leaf, gradient in zip(kept, gradients[len(inputs) :], strict=True):
            accumulate(leaf, gradient)
    return list(gradients[: len(inputs)]), PendingWeights(tasks_of(made, parts))


def backward_weight(pending: PendingWeights) -> None:
    """Run W: add the gradients that I has left to the weights' ``grad``, and free the tensors that they needed."""
    with torch.no_grad():
        pending.run()


def _run_i(
    made: Cut, outputs: Sequence[Tensor], output_gradients: Sequence[Tensor] | None, leaves: Sequence[Tensor]
) -> tuple[Sequence[Tensor | None], Parts]:
    """Run the nodes of I. Returns the gradients of ``leaves``, and what arrives at the nodes of W.

    What a node of I makes is noted by a hook, edge by edge, because autograd only gives the sum of what arrives. The
    edges are asked for nevertheless, so that autograd makes them.
    """
    parts: dict[Edge, list[Part]] = {}
    products: dict[Node, list[Part]] = {}
    makers: dict[Node, dict[int, Part]] = {}
    for crossing in (each for found in made.crossings.values() for each in found):
        above, index, below, formula = crossing
        part = Part(crossing.place, formula)
        parts.setdefault(below, []).append(part)
        if formula is None:
            makers.setdefault(above, {})[index] = part
        else:
            products.setdefault(above, []).append(part)
    for node, noted in products.items():
        node.register_prehook(partial(_note_arrived, noted))
    for node, noted_by_edge in makers.items():
        node.register_hook(partial(note_made, noted_by_edge))
    edges = [(node, 0) for node in products]
    asked = [edge for edge, found in parts.items() if any(part.formula is None for part in found)]
    wanted: list[Any] = [*leaves, *(GradientEdge(*edge) for edge in (*edges, *asked))]
    if not wanted:
        return (), {}
    gradients = torch.autograd.grad(outputs, wanted, output_gradients, allow_unused=True)
    for (node, _), gradient in zip(edges, gradients[len(leaves) :], strict=False):
        if all(part.gradient is None for part in products[node]):  # the product itself did not run
            _note_arrived(products[node], [gradient])
    return gradients[: len(leaves)], parts


def _note_arrived(parts: Sequence[Part], gradients: Sequence[Tensor | None]) -> None:
    """A hook before a product: note the gradient of its output, which hooks on the output may have changed."""
    for part in parts:
        part.gradient = gradients[0]


def _all_at_once(
    outputs: Sequence[Tensor], output_gradients: Sequence[Tensor] | None, inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Run the whole backward, for re-entrant checkpoints: their inner backward cannot be limited to some tensors."""
    with capturing(inputs) as gradients:
        torch.autograd.backward(outputs, output_gradients)
    return gradients


@contextmanager
def capturing(inputs: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
    """Within the context, a full backward gives the gradients of some leaves, and does not add them to their ``grad``.

    A leaf's ``grad`` has the leaf's own layout in memory; what arrives may have another one. Sums over it depend on the
    layout, so that a backward in two stages would not have the bits of one in a whole.

    Args:
        inputs: distinct leaves that require gradients.

    Yields:
        a list with a place for each leaf, which is None until the backward, and if no output depends on the leaf.
    """
    gradients: list[Tensor | None] = [None] * len(inputs)
    nodes = [get_gradient_edge(leaf).node for leaf in inputs]
    handles = [node.register_prehook(partial(_keep_one, gradients, at)) for at, node in enumerate(nodes)]
    try:
        yield gradients
    finally:
        for handle in handles:
            handle.remove()


def _keep_one(kept: list[Tensor | None], at: int, arrived: Sequence[Tensor | None]) -> tuple[None]:
    kept[at] = arrived[0]
    return (None,)
