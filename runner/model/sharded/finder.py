"""Divides the linear layers of any traced model among ranks, without a plan and without a change of its code.

What can be divided is found in the operators (:mod:`runner.model.sharded.search`), and the program of one rank is
made of it (:mod:`runner.model.sharded.rewrite`). What cannot be divided stays whole, on every rank, with its reason.

Source of the two kinds of layers: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from runner.model.sharded.graph import Graph, operator
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.rewrite import DividedDropout, MismatchError, rewritten, shard_of
from runner.model.sharded.search import Found, regions_of
from runner.model.sharded.values import Shard
from runner.model.traced.operators import Program

__all__ = ["DividedPrograms", "Left", "divided"]

_REASONS = {
    "embedding": "an embedding is looked up whole",
    "conv1d": "a convolution is divided by a rule of parallelism.sharding alone",
    "conv2d": "a convolution is divided by a rule of parallelism.sharding alone",
    "conv3d": "a convolution is divided by a rule of parallelism.sharding alone",
    "lstm": "a recurrent layer is not divided",
    "gru": "a recurrent layer is not divided",
    "rnn_tanh": "a recurrent layer is not divided",
    "rnn_relu": "a recurrent layer is not divided",
}


@dataclass(frozen=True)
class Left:
    """A weight of two dimensions or more that every rank holds whole.

    Args:
        name: the parameter's name.
        operator: the name of the traced operator that reads it.
        reason: why it is whole.
    """

    name: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"left whole: {self.name}: {self.reason}"


@dataclass(frozen=True)
class DividedPrograms:
    """One rank's programs of a traced model.

    Args:
        programs: for training (True) and for evaluation (False); one object for both if the traced ones are one.
        shards: the part of each divided parameter that the rank holds, by the first of the parameter's names.
        left: the weights that stay whole.
        dropouts: the dropouts of values of which each rank has a part, in training.
        columns, rows: the operators' names of divided products, in training.
    """

    programs: dict[bool, Program]
    shards: dict[str, Shard]
    left: tuple[Left, ...]
    dropouts: tuple[DividedDropout, ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()


def divided(model: nn.Module, programs: Mapping[bool, Program], group: ShardGroup) -> DividedPrograms:
    """The programs of the group's rank. Nothing of the model is changed: the caller cuts its parameters.

    The programs read a parameter of :attr:`DividedPrograms.shards` as its part, ``shard.cut(parameter)``.

    Args:
        model: the traced model, whole; real or fake.
        programs: what :func:`runner.model.traced.operators.trace` made of it.
        group: the rank's place among those that divide it.
    """
    kept: dict[str, str] = {}
    while True:
        graphs = {mode: Graph(program, model) for mode, program in programs.items()}
        if programs[True] is programs[False]:
            graphs[False] = graphs[True]
        found = {mode: regions_of(graphs[mode], group.degree, kept) for mode in (True,)}
        found[False] = found[True] if graphs[False] is graphs[True] else regions_of(graphs[False], group.degree, kept)
        wrong = _used_otherwise(graphs[True], found[True]) | _used_otherwise(graphs[False], found[False])
        wrong = wrong or _unlike(found)
        if not wrong:
            try:
                return _made(graphs, found, group)
            except MismatchError as error:
                region = error.region
                wrong = dict.fromkeys((region.graph.parameters[node] for node in region.cuts), error.reason)
        kept |= wrong


def _used_otherwise(graph: Graph, found: Found) -> dict[str, str]:
    """The divided parameters that something reads whole, or divided in another way."""
    covered = {place for region in found.regions for place in region.covered}
    cuts: dict[str, set[tuple[int, int]]] = {}
    for region in found.regions:
        for node, cut in region.cuts.items():
            cuts.setdefault(graph.parameters[node], set()).add(cut)
    wrong = {name: "its uses would divide it in different ways" for name, each in cuts.items() if len(each) > 1}
    waiting = [(node, name) for node, name in graph.parameters.items() if name in cuts]
    while waiting:
        node, name = waiting.pop()
        if node in graph.outputs:
            wrong.setdefault(name, "the model returns it")
        for user in node.users:
            if user not in graph.positions:
                continue
            if (user, node) not in covered:
                wrong.setdefault(name, f"{user.name} reads it whole")
            elif user not in found.taken:  # it turns the parameter
                waiting.append((user, name))
    return wrong


def _unlike(found: Mapping[bool, Found]) -> dict[str, str]:
    """The parameters that training and evaluation would divide in different ways."""
    cuts = {mode: each.cuts for mode, each in found.items()}
    names = cuts[True].keys() | cuts[False].keys()
    reasons = {mode: _reasons(each) for mode, each in found.items()}
    wrong = {}
    for name in names:
        if cuts[True].get(name) != cuts[False].get(name):
            mode = name in cuts[True]  # the mode that divides it, if only one does
            wrong[name] = reasons[not mode].get(name, "training and evaluation would divide it in different ways")
    return wrong


def _reasons(found: Found) -> dict[str, str]:
    return {found.graph.parameters[found.graph.products[node].weight]: reason for node, reason in found.left.items()}


def _made(graphs: Mapping[bool, Graph], found: Mapping[bool, Found], group: ShardGroup) -> DividedPrograms:
    graph, training = graphs[True], found[True]
    made = {True: rewritten(graph, training, group)}
    same = graphs[False] is graph
    made[False] = made[True] if same else rewritten(graphs[False], found[False], group)
    placeholders = {graph.parameters[node]: node for region in training.regions for node in region.cuts}
    return DividedPrograms(
        programs={mode: each.program for mode, each in made.items()},
        shards={
            name: shard_of(cut, graph.shape(placeholders[name]), group) for name, cut in sorted(training.cuts.items())
        },
        left=_left(graph, training),
        dropouts=tuple(made[True].dropouts),
        columns=tuple(node.name for region in training.regions for node in region.columns),
        rows=tuple(node.name for region in training.regions for node in region.rows),
    )


def _left(graph: Graph, found: Found) -> tuple[Left, ...]:
    """The weights that stay whole, in the order of the operators that read them."""
    cuts = found.cuts
    left: dict[str, Left] = {}
    for node in graph.program.nodes:
        for operand in node.all_input_nodes:
            name = graph.parameters.get(operand)
            if name is None or name in cuts or len(graph.shape(operand)) < 2:
                continue
            reason = found.left.get(_reader(graph, node))
            kind = operator(node).removeprefix("aten::")
            if reason is None:
                reason = _REASONS.get(kind, f"{kind} of a weight is not followed")
                reason = "all ranks need it for their parts" if node in found.taken else reason
            left.setdefault(name, Left(name, node.name, reason))
    return tuple(left.values())


def _reader(graph: Graph, node: Node) -> Node:
    """The product that reads a parameter which an operator turns, or the operator itself."""
    return next((each for each, product in graph.products.items() if node in product.chain), node)
