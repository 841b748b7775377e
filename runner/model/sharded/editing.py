"""Makes a program of a traced one in which ranks have parts of values: what all such makers have in common.

Every changed operator is run on fake tensors, and its result must have the shape that the rules foresaw. These tensors
have the sizes of the traced batch, and so has what :attr:`Node.meta` says of an operator whose result is a part.
"""

from __future__ import annotations

import operator as plain
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

import runner.model.sharded.operators  # noqa: F401  # registers torch.ops.runner_shards
from runner.model.sharded.emit import Emitter, traced_size
from runner.model.sharded.graph import VIEWS, Graph, operator, tensors_of
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.splits import Divided, Split, Splits
from runner.model.traced.operators import Program

__all__ = ["ProgramEditor"]

_ATEN = torch.ops.aten


class ProgramEditor(Emitter):
    """A program that grows beside the one of which it is made.

    Args:
        graph: the old program.
        group: the ranks that have parts.

    Attributes:
        scope: what is made once for a value is made once within it.
    """

    def __init__(self, graph: Graph, group: ShardGroup) -> None:
        super().__init__()
        self.scope: object = None
        self._old, self._group = graph, group
        self._made: dict[tuple[int, Node, object], Node] = {}  # entries, views of them, and own parts

    def _once(self, operand: Node, kind: object, target: Any, *arguments: Any) -> Node:
        key = id(self.scope), operand, kind
        if key not in self._made:
            self._made[key] = self.call(target, self.copies[operand], *arguments, self._group.name)
        return self._made[key]

    def _apply(self, node: Node, edits: Mapping[str, Any]) -> None:
        """Give an operator other arguments, in which sizes are divided."""
        if not edits:
            return
        assert isinstance(node.target, torch._ops.OpOverload)
        names = [argument.name for argument in node.target._schema.arguments]
        with self.graph.inserting_before(node):
            for name, value in edits.items():
                made = [self._size(each) for each in value] if isinstance(value, list) else self._size(value)
                place = names.index(name)
                if place < len(node.args):
                    node.update_arg(place, made)
                else:
                    node.update_kwarg(name, made)

    def _size(self, size: Any) -> Any:
        if isinstance(size, Divided):
            if isinstance(size.size, Node):
                return self.call(plain.floordiv, self.copies[size.size], self._group.degree)
            return size.size // self._group.degree
        return self.copies[size] if isinstance(size, Node) else size

    def _dropout(self, given: Mapping[str, Any], split: Split) -> Node:
        """Draw the mask of the whole value, in the order in which one process does, and apply the own part."""
        whole, value = given["input"].meta["val"], self.copies[given["input"]]
        strides = self.strides_of_new(whole)
        order = sorted(range(whole.dim()), key=lambda dim: -strides[dim])
        sizes = [self._whole_size(value, dim, size, dim == split.dim) for dim, size in enumerate(whole.shape)]
        mask = self.call(_ATEN.new_ones.default, value, [sizes[dim] for dim in order])
        mask = self.call(_ATEN.dropout.default, mask, given["p"], True)
        if order != sorted(order):
            mask = self.call(_ATEN.permute.default, mask, [order.index(dim) for dim in range(len(order))])
        dim, group = split.dim, self._group.name
        if split.pieces == 1:
            mask = self.call(torch.ops.runner_shards.own.default, mask, dim, group)
        else:
            block = self._old.shape_of(whole)[dim] // split.pieces
            known = not self._old.is_unknown(block)  # the code says the size of a block, or how many there are
            apart = [-1, block] if known else [self._count(split), -1]
            mask = self.call(_ATEN.reshape.default, mask, [*sizes[:dim], *apart, *sizes[dim + 1 :]])
            mask = self.call(torch.ops.runner_shards.own.default, mask, dim + 1, group)
            mask = self.call(_ATEN.reshape.default, mask, [*sizes[:dim], -1, *sizes[dim + 1 :]])
        return self.call(_ATEN.mul.Tensor, value, mask)

    def _count(self, split: Split) -> Any:
        """The number of pieces, each of which is divided."""
        return split.pieces

    def _whole_size(self, value: Node, dim: int, size: Any, divided: bool) -> Any:
        if not isinstance(size, torch.SymInt):
            return size
        made = self.call(_ATEN.sym_size.int, value, dim)
        return self.call(plain.mul, made, self._group.degree) if divided else made

    def _shape(self, tensor: Tensor, split: Split | None) -> tuple[int, ...]:
        shape = [traced_size(size) for size in tensor.shape]
        if split is not None:
            shape[split.dim] //= self._group.degree
        return tuple(shape)

    def _check(self, node: Node, split: Splits) -> None:
        """Compare what an operator gives with what was foreseen."""
        made = self.copies[node]
        if made not in self.changed:
            return
        wanted, given = [*tensors_of(node)], [*tensors_of(made)]
        splits = split if isinstance(split, tuple) else [split] * len(wanted)
        shapes = [self._shape(tensor, each) for tensor, each in zip(wanted, splits, strict=True)]
        found = [tuple(tensor.shape) for tensor in given]
        if shapes != found or [tensor.dtype for tensor in wanted] != [tensor.dtype for tensor in given]:
            raise ValueError(f"a rank's part has the shape {found} where {shapes} was expected")
        if split is None:
            self.keep(node, made)

    def _finished(self, program: Program, outputs: tuple[Any, ...]) -> Program:
        """The program, with operators that nothing reads any more left out."""
        for node in reversed(self.graph.nodes):
            if node.op == "call_function" and operator(node) in VIEWS and not node.users:
                self.graph.erase_node(node)
        nodes = tuple(node for node in self.graph.nodes if node.op in ("call_function", "get_attr"))
        return replace(
            program,
            nodes=nodes,
            weights={self.copies[node]: name for node, name in program.weights.items()},
            constants={self.copies[node]: constant for node, constant in program.constants.items()},
            inputs=tuple(self.copies[each] if isinstance(each, Node) else each for each in program.inputs),
            outputs=outputs,
        )
