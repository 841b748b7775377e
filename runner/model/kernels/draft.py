"""A copy of a trace whose operators may be put in another's place, while the trace itself stays what it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from runner.model.traced.cuts import is_random
from runner.model.traced.operators import Program

__all__ = ["Draft", "has_shape_of", "is_alike", "value_of"]


class Draft:
    """The copy.

    Args:
        program: a trace, before it is cut.
    """

    def __init__(self, program: Program) -> None:
        self._program, self.graph = program, Graph()
        self._copies: dict[Node, Node] = {}
        inputs = [node for node in program.inputs if isinstance(node, Node)]
        for node in (*program.weights, *program.constants, *inputs, *program.nodes):
            self._copies[node] = self.graph.node_copy(node, self._copies.__getitem__)
        outputs = (self._copies[each] if isinstance(each, Node) else each for each in program.outputs)
        self._output = self.graph.output(tuple(outputs))
        self._unread = {node for node in self.graph.nodes if not node.users}

    @property
    def weights(self) -> set[Node]:
        """The placeholders of parameters and buffers."""
        return {self._copies[node] for node in self._program.weights}

    @property
    def constants(self) -> set[Node]:
        """The placeholders of constant tensors."""
        return {self._copies[node] for node in self._program.constants}

    def operators(self) -> Iterator[Node]:
        """The calls of torch's operators, in the order in which they run; those that are added meanwhile are not."""
        for node in list(self.graph.nodes):
            if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                yield node

    def add(self, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of a function in front of a node, with the value that it gives in the trace.

        Raises:
            Exception: the function does not take such values.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = dict(before.meta)
        values = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        mode = next(each.fake_mode for each in _tensors_in(before) if hasattr(each, "fake_mode"))
        with mode, torch.no_grad():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def put(self, old: Node, new: Node) -> None:
        """Let everything that reads one node read another one."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    def finished(self) -> Program:
        """The trace as it has become, without operators that nothing reads any more."""
        for node in reversed(list(self.graph.nodes)):
            is_call = node.op in ("call_function", "get_attr") and node not in self._unread
            if is_call and not node.users and not _acts(node, self._program):
                self.graph.erase_node(node)
        program, copies = self._program, self._copies
        return replace(
            program,
            nodes=tuple(node for node in self.graph.nodes if node.op in ("call_function", "get_attr")),
            weights={copies[node]: name for node, name in program.weights.items()},
            constants={copies[node]: tensor for node, tensor in program.constants.items()},
            inputs=tuple(copies[each] if isinstance(each, Node) else each for each in program.inputs),
            outputs=tuple(self._output.args[0]),
        )


def _tensors_in(node: Node) -> Iterator[Tensor]:
    for each in (node, *node.all_input_nodes):
        if isinstance(each.meta.get("val"), Tensor):
            yield each.meta["val"]


def _acts(node: Node, program: Program) -> bool:
    """Whether an operator does more than give a value: it changes one in place, or draws numbers."""
    target = node.target
    changes = isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable
    return changes or is_random(node, program.owner)


def value_of(node: Any) -> Tensor | None:
    """The traced tensor that a node gives; None if it gives none, or several, or is no node."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


def is_alike(one: Any, other: Any) -> bool:
    """Whether two nodes give tensors of one form: shape, kind of numbers and device."""
    first, second = value_of(one), value_of(other)
    if first is None or second is None or (first.dtype, first.device) != (second.dtype, second.device):
        return False
    return has_shape_of(one, other)


def has_shape_of(one: Any, other: Any) -> bool:
    """Whether two nodes give tensors of one shape, whatever its unknown sizes are."""
    first, second = value_of(one), value_of(other)
    return first is not None and second is not None and list(map(str, first.shape)) == list(map(str, second.shape))
