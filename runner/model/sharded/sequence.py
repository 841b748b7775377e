"""Makes the program of a rank whose values between layers are divided by tokens, as :mod:`tokens` has found."""

from __future__ import annotations

import operator as plain
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from typing_extensions import override

from runner.model.sharded.editing import ProgramEditor
from runner.model.sharded.graph import Graph, arguments, operator
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.operators import drawn_apart
from runner.model.sharded.splits import Split
from runner.model.sharded.tokens import ENTRY, TokensError, TokenWalk
from runner.model.traced.operators import Program

__all__ = ["Sequenced", "sequenced"]

_ATEN, _SHARDS = torch.ops.aten, torch.ops.runner_shards
Dims = tuple[int | None, ...]


@dataclass(frozen=True)
class Sequenced:
    """A rank's programs, between whose layers values are divided by tokens.

    Args:
        programs: for training (True) and for evaluation (False).
        exits: the divided dimension of each value of the flat output; None: it is whole.
        divides: whether anything is divided in them.
        reasons: why tokens are together somewhere.
    """

    programs: dict[bool, Program]
    exits: Dims
    divides: bool
    reasons: tuple[str, ...]


def sequenced(
    model: nn.Module,
    programs: Mapping[bool, Program],
    group: ShardGroup,
    entries: Dims,
    *,
    last: bool,
    divides: bool = True,
    apart: bool = False,
) -> Sequenced:
    """The programs of the group's rank.

    Args:
        model: the traced model, whose layers are divided by features.
        programs: its programs, with what ranks exchange in them.
        group: the ranks.
        entries: the divided dimension of each value of the flat input; None: it is whole.
        last: whether what it returns must be whole.
        divides: whether sums may be divided by tokens.
        apart: whether random numbers between columns and rows are drawn here for the rank's own features.

    Raises:
        TokensError: tokens cannot be divided.
    """
    found: dict[bool, TokenWalk] = {}
    for mode in (True, False):
        program = programs[mode]
        if mode is False and program is programs[True]:
            found[False] = found[True]
            continue
        dims = {
            node: dim
            for node, dim in zip(program.inputs, entries, strict=True)
            if isinstance(node, Node) and dim is not None
        }
        found[mode] = TokenWalk(Graph(program, model, group.degree), group.degree, dims, divides=divides)
        found[mode].run()
    exits = _exits(found, last)
    made = {True: _Maker(found[True], group, entries, exits, apart).program()}
    alike = found[False] is found[True]
    made[False] = made[True] if alike else _Maker(found[False], group, entries, exits, apart).program()
    return Sequenced(made, exits, bool(found[True].splits), tuple(found[True].reasons))


def _exits(found: Mapping[bool, TokenWalk], last: bool) -> Dims:
    """The divided dimension of each result, where both modes agree."""
    each = [[_exit(walk, value) for value in walk.graph.program.outputs] for walk in found.values()]
    return tuple(first if first == second and not last else None for first, second in zip(*each, strict=True))


def _exit(walk: TokenWalk, value: Any) -> int | None:
    split = walk.split(value) if isinstance(value, Node) else None
    return split.dim if split is not None and split.pieces == 1 else None


class _Maker(ProgramEditor):
    """See :func:`sequenced`."""

    def __init__(self, walk: TokenWalk, group: ShardGroup, entries: Dims, exits: Dims, apart: bool) -> None:
        super().__init__(walk.graph, group)
        self._walk, self._entries, self._exits = walk, entries, exits
        self._apart = frozenset(walk.feature_draws()) if apart else frozenset()

    def program(self) -> Program:
        """Make the program."""
        old = self._old.program
        inputs = [node for node in old.inputs if isinstance(node, Node)]
        for node in (*old.weights, *old.constants, *inputs):
            copied = self.copies[node] = self.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
            split = self._walk.split(node)
            if split is not None:
                self.give(copied, self.empty(self._shape(node.meta["val"], split), node.meta["val"]))
                copied.meta["val"] = node.meta["val"]
        owners = dict.fromkeys(self.graph.nodes, -1)
        for position, node in enumerate(old.nodes):
            self.source = node
            try:
                self.copies[node] = self._rewrite(node)
                self._check(node, self._walk.splits.get(node))
            except (AssertionError, LookupError, RuntimeError, TypeError) as error:
                raise TokensError(f"{node.name} cannot be divided: {str(error).splitlines()[0][:200]}") from error
            for made in reversed(self.graph.nodes):  # what has been added for this one
                if made in owners:
                    break
                owners[made] = position
        outputs = tuple(self._given(value, dim) for value, dim in zip(old.outputs, self._exits, strict=True))
        self.graph.output(outputs)
        made = self._finished(old, outputs)
        parts = {
            self.copies[node]: (dim, self._group.degree)
            for node, dim in zip(old.inputs, self._entries, strict=True)
            if isinstance(node, Node) and dim is not None
        }
        return replace(made, uncut=_moved(old.uncut, made.nodes, owners), parts=parts)

    def _given(self, value: Any, dim: int | None) -> Any:
        if not isinstance(value, Node):
            return value
        split = self._walk.splits.get(value)
        if split is None or dim is not None:
            return self.copies[value]
        return self._gathered(value, partial=False)

    # Operators

    def _rewrite(self, node: Node) -> Node:
        walk = self._walk
        if node in walk.scattered:
            return self._scattered(node, *walk.scattered[node])
        if operator(node) == ENTRY and walk.splits.get(node.all_input_nodes[0]) is not None:
            return self._gathered(node.all_input_nodes[0], partial=True)
        split = walk.splits.get(node)
        if operator(node) == "aten::dropout" and isinstance(split, Split):
            given = arguments(node)
            if given["train"] and given["p"]:
                return self._dropout(given, split)
        if node in self._apart:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), self._read)
            assert isinstance(node.target, torch._ops.OpOverload)
            copied = self.graph.call_function(drawn_apart, (self._group.name, node.target, *args), kwargs)
            copied.meta = dict(node.meta)
        else:
            copied = self.graph.node_copy(node, self._read)
        if node in walk.notes:
            self._apply(copied, walk.notes[node].edits)
        if operator(node).endswith("sym_size"):
            return self._whole_number(node, copied)
        inputs = copied.all_input_nodes
        if not self.changed.isdisjoint(inputs) and all("val" in each.meta for each in inputs):
            self.evaluate(copied)
        return copied

    def _scattered(self, node: Node, dim: int, samples: Node | None) -> Node:
        """The own tokens of a sum."""
        value, group = self.copies[node.all_input_nodes[0]], self._group.name
        if samples is None:
            return self.call(_SHARDS.reduce_scatter.default, value, dim, group)
        features = self._old.shape(node)[1]
        count = self.call(_ATEN.sym_size.int, self.copies[samples], 0)
        apart = self.call(_ATEN.reshape.default, value, [count, -1, features])
        own = self.call(_SHARDS.reduce_scatter.default, apart, 1, group)
        return self.call(_ATEN.reshape.default, own, [-1, features])

    def _read(self, operand: Node) -> Node:
        """What the present operator reads in place of an operand."""
        node, walk = self.source, self._walk
        assert node is not None
        if (node, operand) in walk.gathered:
            return self._gathered(operand, partial=False)
        notes = walk.notes.get(node)
        if notes is not None and operand in notes.owned:
            dim = notes.owned[operand]
            return self._once(operand, ("own", dim, self._moment(operand)), _SHARDS.own.default, dim)
        if notes is not None and operand in notes.entered:
            return self._once(operand, ("enter", self._moment(operand)), _SHARDS.identity.default)
        return self.copies[operand]

    def _gathered(self, operand: Node, *, partial: bool) -> Node:
        """All tokens of a value; what reads it computes a part of the gradient on each rank, or all of it."""
        split = self._walk.splits[operand]
        assert isinstance(split, Split)
        key = id(self.scope), operand, ("gather", partial, self._moment(operand))
        if key not in self._made:
            made = self._all_tokens(operand, split, partial)
            self.keep(operand, made)
            self._made[key] = made
        return self._made[key]

    def _all_tokens(self, operand: Node, split: Split, partial: bool) -> Node:
        value, gather, group = self.copies[operand], _SHARDS.all_gather.default, self._group.name
        if split.pieces == 1:
            return self.call(gather, value, split.dim, partial, group)
        shape = self._old.shape(operand)
        if split.dim or any(map(self._old.is_unknown, shape[1:])):
            raise TokensError(f"{operand.name} cannot be put together from parts of its tokens")
        apart = self.call(_ATEN.reshape.default, value, [self._count(split), -1, *shape[1:]])
        return self.call(_ATEN.reshape.default, self.call(gather, apart, 1, partial, group), [-1, *shape[1:]])

    @override
    def _count(self, split: Split) -> Any:
        samples = next((each for each in self._walk.inputs() if self._old.shape(each)[0] == split.pieces), None)
        if samples is None:
            raise TokensError("values of several samples, one behind the other, cannot be taken apart")
        return self.call(_ATEN.sym_size.int, self.copies[samples], 0)

    def _moment(self, operand: Node) -> int:
        """How often the memory of a value has been changed before the present operator."""
        assert self.source is not None
        now = self._old.positions[self.source]
        return sum(position < now for position in self._old.changes.get(operand, ()))

    def _whole_number(self, node: Node, copied: Node) -> Node:
        """A size as the program has it, where the present value has a part of it."""
        operand = node.all_input_nodes[0]
        split, shape = self._walk.splits.get(operand), self._old.shape(operand)
        if split is None:
            return copied
        asked = node.args[1] if len(node.args) > 1 else None
        if not isinstance(split, Split) or not isinstance(asked, int):
            raise TokensError(f"{node.name} asks for all sizes of a value whose tokens are divided")
        self.evaluate(copied)
        if asked % len(shape) != split.dim:
            return self._same(node, copied)
        return self._same(node, self.call(plain.mul, copied, self._group.degree))

    def _same(self, node: Node, made: Node) -> Node:
        self.keep(node, made)
        return made


def _moved(uncut: frozenset[int], nodes: Sequence[Node], owners: Mapping[Node, int]) -> frozenset[int]:
    """The positions at which the new program must not be cut: those before what was made of such an operator."""
    found, before = set(), -1
    for position, node in enumerate(nodes):
        owner = owners.get(node, len(owners))
        if owner != before and owner in uncut:
            found.add(position)
        before = owner
    return frozenset(found)
