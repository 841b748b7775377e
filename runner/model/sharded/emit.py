"""Builds a graph of operators, each of which is run on fake tensors as it is added.

These tensors have the sizes of the traced batch, with which no symbols need to be reckoned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from runner.model.fake import fake_tensors

__all__ = ["Emitter", "traced_size"]


class Emitter:
    """A graph that grows.

    Attributes:
        graph: the graph.
        copies: the new node of each old one.
        source: the old operator in whose place operators are added.
        added: the operators that are not copies of whole-valued old ones.
        changed: the nodes whose values have not the shapes of the old nodes'.
    """

    def __init__(self) -> None:
        self.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.source: Node | None = None
        self.added: set[Node] = set()
        self.changed: set[Node] = set()
        self._mode: Any = fake_tensors()
        self._values: dict[Node, Any] = {}

    def call(self, target: Any, *arguments: Any) -> Node:
        """Add an operator in the place of the present one."""
        assert self.source is not None
        made = self.graph.call_function(target, arguments)
        made.meta = {key: value for key, value in self.source.meta.items() if key != "val"}
        self.added.add(made)
        self.evaluate(made)
        return made

    def evaluate(self, node: Node) -> None:
        """Run an operator of the graph.

        Raises:
            Exception: it does not take its operands.
        """
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._value)
        with self._mode, torch.no_grad():
            self.give(node, node.target(*args, **kwargs))  # type: ignore[operator]

    def give(self, node: Node, value: Any) -> None:
        """Note that a node has another value than the old one."""
        node.meta["val"] = self._values[node] = value
        self.changed.add(node)

    def keep(self, old: Node, new: Node) -> None:
        """Note that a node gives the shape that the old one gave, so that its readers need not be run."""
        new.meta["val"] = old.meta["val"]
        self.changed.discard(new)

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A fake tensor of another shape."""
        with self._mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def strides_of_new(self, like: Tensor) -> tuple[int, ...]:
        """The strides of a tensor that an operator makes like a traced one."""
        with self._mode:
            return torch.empty_like(self._at_traced_sizes(like)).stride()

    def _value(self, node: Node) -> Any:
        if node not in self._values:
            self._values[node] = pytree.tree_map(self._at_traced_sizes, node.meta["val"])
        return self._values[node]

    def _at_traced_sizes(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return traced_size(value)
        if not isinstance(value, Tensor):
            return value
        shape, strides = ([traced_size(size) for size in sizes] for sizes in (value.shape, value.stride()))
        with self._mode:
            return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def traced_size(size: Any) -> int:
    """A size in the traced batch.

    Raises:
        TypeError: it depends on values.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    if size.node.hint is None:
        raise TypeError("a size depends on values")
    return int(size.node.hint)
