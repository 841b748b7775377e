"""The autograd graph of a stage's outputs, read once: its nodes in order, and what each of them is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, TypeAlias

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

__all__ = ["Edge", "Graph", "Node", "is_behind_hooks", "is_leaf", "is_view", "order_of", "unpacks_once"]

Node: TypeAlias = Any
"""An autograd node; torch has a class for each operator."""

Edge: TypeAlias = tuple[Node, int]
"""A node, and which of its forward's outputs the gradient belongs to."""

_ACCUMULATE = "AccumulateGrad"
_REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
_VIEWS = frozenset(
    {
        "AliasBackward0", "CloneBackward0", "ExpandBackward0", "PermuteBackward0", "ReshapeAliasBackward0",
        "SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "SqueezeBackward0",
        "SqueezeBackward1", "SqueezeBackward2", "TBackward0", "ToCopyBackward0", "TransposeBackward0",
        "UnbindBackward0", "UnsafeViewBackward0", "UnsqueezeBackward0", "ViewBackward0",
    }
)  # fmt: skip


class Graph:
    """The autograd graph of some outputs.

    Attributes:
        edges: for each node, where its backward sends the gradients that it makes, in order; the node is None where the
            forward's operand required no gradient. Leaves have no edges.
        order: all nodes; those that a node sends gradients to come before it.
        roots: the nodes of the outputs, as keys.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self.edges: dict[Node, tuple[tuple[Node | None, int], ...]] = {}
        self.order: list[Node] = []
        self.roots = dict.fromkeys(get_gradient_edge(output).node for output in outputs)  # in the same order each time
        self._enter(self.roots)

    def _enter(self, roots: Iterable[Node]) -> None:
        """Walk the graph without recursion: a node is taken twice, before and after what it leads to."""
        todo = [(root, False) for root in roots]
        while todo:
            node, is_done = todo.pop()
            if is_done:
                self.order.append(node)
            elif node not in self.edges:
                self.edges[node] = edges = node.next_functions
                todo.append((node, True))
                todo += [(after, False) for after, _ in edges if after is not None and after not in self.edges]

    def after(self, node: Node) -> list[Node]:
        """The nodes to which a node sends gradients, with repetitions."""
        return [after for after, _ in self.edges[node] if after is not None]

    @property
    def leaves(self) -> list[Node]:
        """The nodes that accumulate into leaves."""
        return [node for node in self.order if is_leaf(node)]

    @property
    def is_reentrant(self) -> bool:
        """Whether it contains a re-entrant activation checkpoint."""
        return any(type(node).__name__ == _REENTRANT_CHECKPOINT for node in self.order)


def is_leaf(node: Node) -> bool:
    """Whether the node adds to the ``grad`` of a leaf, which is its ``variable``."""
    return type(node).__name__ == _ACCUMULATE


def is_view(node: Node) -> bool:
    """Whether the node only moves or converts elements: it saves no tensors and costs next to nothing."""
    return type(node).__name__ in _VIEWS


def order_of(node: Node) -> int:
    """The node's place in a backward: autograd runs the nodes that are ready in ascending order of this number."""
    return -int(node._sequence_nr())


def is_behind_hooks(node: Node) -> bool:
    """Whether hooks hold a tensor that the node saved, and give it back in one run of autograd only.

    So it is with a region of activation checkpointing, whose tensors are unpacked together.
    """
    kind: Any = type(node)
    return any(
        saved is not None and unpacks_once(saved)
        for name in _names_of_saved(kind)
        for saved in _each(getattr(node, name))
    )


def unpacks_once(saved: Any) -> bool:
    """Whether a tensor that a node saved is behind hooks that do not say that they can be called at any time."""
    hook = saved.unpack_hook
    return hook is not None and not getattr(hook, "any_time", False)


@cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _each(saved: Any) -> Iterable[Any]:
    return saved if isinstance(saved, list | tuple) else (saved,)
