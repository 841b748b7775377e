"""Makes a rank's program of a traced one, as the regions say: parts of weights, and what the ranks exchange.

Every changed operator is run on fake tensors, and its result must have the shape that the rules foresaw. These tensors
have the sizes of the traced batch, and so has what :attr:`Node.meta` says of an operator between columns and rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node
from torch.fx.node import map_arg

import runner.model.sharded.operators  # noqa: F401  # registers torch.ops.runner_shards
from runner.model.sharded.editing import ProgramEditor
from runner.model.sharded.graph import Graph, Product, arguments, operator, tensors_of
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.operators import drawn_apart
from runner.model.sharded.regions import Cut, Region
from runner.model.sharded.search import Found
from runner.model.sharded.splits import Split
from runner.model.sharded.values import Shard
from runner.model.traced.operators import Program

__all__ = ["DividedDropout", "MismatchError", "rewritten", "shard_of"]

_ATEN = torch.ops.aten


class MismatchError(Exception):
    """A rewritten operator does not give what was foreseen.

    Args:
        region: where it lies.
        reason: what is wrong.
    """

    def __init__(self, region: Region, reason: str) -> None:
        super().__init__(reason)
        self.region, self.reason = region, reason


@dataclass(frozen=True)
class DividedDropout:
    """A dropout of a value of which each rank has a part.

    Args:
        name: the name of its operator in the traced program.
        dim: the divided dimension of its result.
        exact: whether each rank takes its part of the mask that one process draws. Otherwise (inside attention) each
            draws a mask of its own, and what is drawn later differs from one process, too.
    """

    name: str
    dim: int
    exact: bool


def shard_of(cut: Cut, shape: tuple[int, ...], group: ShardGroup) -> Shard:
    """The part of a parameter that the group's rank holds."""
    return Shard(cut[0], group.index, group.degree, shape, cut[1])


def rewritten(graph: Graph, found: Found, group: ShardGroup) -> _Rewriter:
    """The program of a rank, and what is to be known of it.

    Raises:
        MismatchError: an operator does not give what was foreseen.
    """
    rewriter = _Rewriter(graph, found, group)
    rewriter.run()
    return rewriter


class _Rewriter(ProgramEditor):
    """See :func:`rewritten`.

    Attributes:
        program: the rank's.
        dropouts: the dropouts of divided values.
    """

    program: Program

    def __init__(self, graph: Graph, found: Found, group: ShardGroup) -> None:
        super().__init__(graph, group)
        self.dropouts: list[DividedDropout] = []
        self._found = found
        self._turned = {reader for region in found.regions for reader, _ in region.covered} - {*found.taken}
        self._region: Region | None = None  # in which the present operator lies

    def run(self) -> None:
        """Make the program."""
        program = self._old.program
        cuts = {node: cut for region in self._found.regions for node, cut in region.cuts.items()}
        inputs = [node for node in program.inputs if isinstance(node, Node)]
        for node in (*program.weights, *program.constants, *inputs):
            copied = self.copies[node] = self.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            if node in cuts:
                part = shard_of(cuts[node], self._old.shape(node), self._group)
                self.give(copied, self.empty(part.shape, node.meta["val"]))
        for node in program.nodes:
            self.source, self._region = node, self._found.taken.get(node)
            self.scope = self._region
            try:
                self.copies[node] = self._rewrite(node)
                if self._region is not None:
                    self._check(node, self._region.splits.get(node))
            except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
                reason = f"{node.name} cannot be divided: {str(error).splitlines()[0][:200]}"
                raise MismatchError(self._region or self._found.regions[0], reason) from error
        outputs = map_arg(program.outputs, self.copies.__getitem__)
        self.graph.output(outputs)
        made = self._finished(program, outputs)
        self.program = replace(made, uncut=self._uncut(made.nodes))

    # Operators

    def _rewrite(self, node: Node) -> Node:
        region = self._region
        if region is None:
            return self._outside(node)
        if node in region.rows:
            return self._row(self._old.products[node])
        split = region.splits[node]
        if operator(node) == "aten::dropout" and isinstance(split, Split):
            given = arguments(node)
            if given["train"] and given["p"]:
                self.dropouts.append(DividedDropout(node.name, split.dim, exact=True))
                return self._dropout(given, split)
        attends = operator(node) == "aten::scaled_dot_product_attention"
        if attends and isinstance(split, Split) and arguments(node)["dropout_p"]:
            self.dropouts.append(DividedDropout(node.name, split.dim, exact=False))
            return self._attention(node)
        copied = self.graph.node_copy(node, self._read)
        self._apply(copied, region.edits.get(node, {}))
        self.added.add(copied)
        self.evaluate(copied)
        return copied

    def _outside(self, node: Node) -> Node:
        """An operator that has whole results, or turns a divided parameter."""
        copied = self.graph.node_copy(node, self.copies.__getitem__)
        inputs = copied.all_input_nodes
        if self.changed.isdisjoint(inputs) or any("val" not in each.meta for each in inputs):
            return copied
        self.evaluate(copied)
        before, after = [self._shape(t, None) for t in tensors_of(node)], [tuple(t.shape) for t in tensors_of(copied)]
        if before == after:
            self.keep(node, copied)
        elif node in self._turned:
            self.added.add(copied)
        else:
            raise ValueError(f"it has the shape {after} instead of {before}")
        return copied

    def _read(self, operand: Node) -> Node:
        """What the present operator reads in place of an operand."""
        node, region = self.source, self._region
        assert node is not None
        assert region is not None
        if node in region.columns and operand is self._old.products[node].value:
            return self._entered(operand)
        if (node, operand) in region.entered:
            return self._entered(operand)
        if (node, operand) in region.owned:
            dim = region.owned[node, operand]
            return self._once(operand, f"own{dim}", torch.ops.runner_shards.own.default, dim)
        return self.copies[operand]

    def _entered(self, operand: Node) -> Node:
        """A whole value as the region's operators read it; views of one value share one entry."""
        if self._old.base(operand) is operand:
            return self._once(operand, "enter", torch.ops.runner_shards.identity.default)
        key = id(self.scope), operand, "view"
        if key not in self._made:
            below = arguments(operand)["self"]
            entered = self._entered(below)
            made = self.graph.node_copy(operand, lambda each: entered if each is below else self.copies[each])
            self.added.add(made)
            self.evaluate(made)
            self._made[key] = made
        return self._made[key]

    def _row(self, product: Product) -> Node:
        """The sum of the ranks' products, and then the bias."""
        value, operand = self.copies[product.value], self.copies[product.operand]
        target = product.node.target
        if operator(product.node) == "aten::addmm":
            target = _ATEN.mm.default
        made = self.call(target, value, operand)
        made = self.call(torch.ops.runner_shards.all_reduce.default, made, self._group.name)
        self.added.discard(made)
        self.keep(product.node, made)
        if product.bias is not None:
            made = self.call(_ATEN.add.Tensor, made, self.copies[product.bias])
            self.added.discard(made)
        return made

    def _attention(self, node: Node) -> Node:
        """Attention with a dropout of its probabilities, for which each rank draws numbers of its own."""
        args, kwargs = map_arg((node.args, dict(node.kwargs)), self._read)
        assert isinstance(node.target, torch._ops.OpOverload)
        copied = self.graph.call_function(drawn_apart, (self._group.name, node.target, *args), kwargs)
        copied.meta = {key: value for key, value in node.meta.items() if key != "val"}
        self.added.add(copied)
        self.evaluate(copied)
        return copied

    def _uncut(self, nodes: tuple[Node, ...]) -> frozenset[int]:
        """The positions that lie between the making of a region's value and its last use."""
        positions = {node: position for position, node in enumerate(nodes)}
        inside: set[int] = set()
        for node in self.added:
            if node in positions:
                last = max((positions[user] for user in node.users if user in positions), default=positions[node])
                inside.update(range(positions[node] + 1, last + 1))
        return frozenset(inside)
