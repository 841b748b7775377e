"""What lies between linear layers whose results ranks divide, the columns, and those that sum over them, the rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from torch.fx import Node

from runner.model.sharded.follow import follow
from runner.model.sharded.graph import Graph, Product, operator
from runner.model.sharded.splits import Conflict, Split, Splits

__all__ = ["Cut", "Region", "origins_of"]

Cut = tuple[int, int]  # the dimension of a parameter that is divided, and of how many pieces
_PLAIN = ("sym_size", "sym_stride", "sym_numel")


@dataclass
class Region:
    """What lies between some columns and their rows.

    Args:
        graph: the program.
        degree: number of ranks.
        columns: the column products, with the number of pieces of each one's weight.
        taken: operators of other regions.
        kept: the parameters that must stay whole, with the reasons.

    Attributes:
        splits: how each value is divided.
        rows: the row products.
        cuts: how each parameter is divided, by its placeholder.
        covered: the places, as (operator, operand), where divided parameters are read, or whole ones turned.
        edits: other arguments that operators get, by name.
        entered: places where whole values are read whose gradients the ranks must sum.
        owned: places where whole values are read of which a rank needs its part, with the dimension.
    """

    graph: Graph
    degree: int
    columns: dict[Node, int]
    taken: Mapping[Node, Any]
    kept: Mapping[str, str]
    splits: dict[Node, Splits] = field(default_factory=dict)
    rows: set[Node] = field(default_factory=set)
    cuts: dict[Node, Cut] = field(default_factory=dict)
    covered: set[tuple[Node, Node]] = field(default_factory=set)
    edits: dict[Node, dict[str, Any]] = field(default_factory=dict)
    entered: set[tuple[Node, Node]] = field(default_factory=set)
    owned: dict[tuple[Node, Node], int] = field(default_factory=dict)

    def split(self, node: Node) -> Split | None:
        """How a node's only value is divided."""
        found = self.splits.get(node)
        return found if isinstance(found, Split) else None

    def edit(self, node: Node, name: str, value: Any) -> None:
        """Note that a rank gives an operator another argument."""
        self.edits.setdefault(node, {})[name] = value

    def enter(self, node: Node, operand: Node) -> None:
        """Note that an operator reads a whole value beside divided ones."""
        if operand in self.graph.differentiable:
            self.entered.add((node, operand))

    def cut(self, node: Node, operand: Node, dim: int, pieces: int) -> bool:
        """Note that a rank needs its part of a whole operand; a parameter is divided itself."""
        if operand in self.graph.parameters:
            try:
                self._cut_parameter(node, (), operand, (dim, pieces), frozenset())
            except Conflict:
                return False
            return True
        if operand in self.graph.differentiable or pieces != 1:
            return False
        self.owned[node, operand] = dim
        return True

    def _cut_parameter(
        self, node: Node, chain: tuple[Node, ...], weight: Node, cut: Cut, origins: frozenset[Node]
    ) -> None:
        name, size = self.graph.parameters[weight], self.graph.shape(weight)[cut[0]]
        if name in self.kept:
            raise Conflict(f"{name} stays whole: {self.kept[name]}", origins)
        if size % (cut[1] * self.degree):
            raise Conflict(f"{self.degree} does not divide its {size} features", origins)
        if self.cuts.setdefault(weight, cut) != cut:
            raise Conflict(f"{name} would be divided in two ways", origins)
        read = weight
        for reader in (*chain, node):
            self.covered.add((reader, read))
            read = reader

    def walk(self) -> None:
        """Follow the columns' results to the rows.

        Raises:
            Conflict: a way ends otherwise.
        """
        waiting: list[tuple[int, Node]] = []
        seen: set[Node] = set()
        self._wait(waiting, seen, self.columns)
        while waiting:
            _, node = heapq.heappop(waiting)
            made = self._pass(node)
            if made is None:
                continue
            self.splits[node] = made
            if node in self.graph.outputs:
                raise Conflict("its result leaves the model", origins_of(made))
            self._wait(waiting, seen, node.users)
        ended = frozenset().union(*(origins_of(self.splits[self.graph.products[row].value]) for row in self.rows))
        if unused := self.columns.keys() - ended:
            raise Conflict("no layer reads its result whose results ranks could sum", frozenset(unused))

    def _wait(self, waiting: list[tuple[int, Node]], seen: set[Node], nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node in self.graph.positions and node not in seen:
                seen.add(node)
                heapq.heappush(waiting, (self.graph.positions[node], node))

    def _pass(self, node: Node) -> Splits:
        """How a node's result is divided; None: it is whole again."""
        product = self.graph.products.get(node)
        operands = [each for each in node.all_input_nodes if each in self.splits]
        origins = frozenset().union(*(origins_of(self.splits[each]) for each in operands))
        if node in self.columns:
            if operands:
                raise Conflict(f"{node.name} reads divided features", origins | {node})
            return self._column(self.graph.products[node])
        if node in self.taken:
            raise Conflict(f"{node.name} is divided otherwise", origins)
        if product is not None and product.value in self.splits:
            return self._row(product)
        if operator(node) == "getitem":
            parts = self.splits[operands[0]]
            assert isinstance(parts, tuple)
            return parts[cast(int, node.args[1])]
        if any(operator(node).endswith(name) for name in _PLAIN):
            self._check_size(node, operands[0])
            return None
        value, tuples = node.meta.get("val"), any(isinstance(self.splits[each], tuple) for each in operands)
        if tuples or not isinstance(value, Tensor | tuple | list):
            raise Conflict(f"{node.name} is not followed", origins)
        return follow(self, node)

    def _check_size(self, node: Node, operand: Node) -> None:
        """Let an operator ask for a size of a divided value, if that is not of the divided dimension."""
        split, count = self.split(operand), len(self.graph.shape(operand))
        if split is None or len(node.args) < 2 or cast(int, node.args[1]) % count == split.dim:
            raise Conflict(f"{node.name} asks for the number of divided features", origins_of(self.splits[operand]))

    def _column(self, product: Product) -> Split:
        node, own = product.node, frozenset([product.node])
        cut = product.out, self.columns[node]
        self._cut_parameter(node, product.chain, product.weight, cut, own)
        if product.bias is not None:
            if product.bias not in self.graph.parameters or len(self.graph.shape(product.bias)) != 1:
                raise Conflict("its bias is no parameter", own)
            self._cut_parameter(node, (), product.bias, (0, cut[1]), own)
        return Split(len(self.graph.shape(node)) - 1, cut[1], own)

    def _row(self, product: Product) -> Split | None:
        node, split = product.node, self.split(product.value)
        assert split is not None
        if split.dim < len(self.graph.shape(product.value)) - 1:  # it computes the same for each divided part
            for operand in (product.operand, product.bias):
                if operand is not None:
                    self.enter(node, operand)
            return split
        self._cut_parameter(node, product.chain, product.weight, (1 - product.out, split.pieces), split.origins)
        self.rows.add(node)
        return None


def origins_of(splits: Splits) -> frozenset[Node]:
    """The column products from which a value comes."""
    if splits is None:
        return frozenset()
    return splits.origins if isinstance(splits, Split) else splits[0].origins
