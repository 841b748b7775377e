"""Finds where a traced model can be cut, and which values cross each cut.

A cut at position c lies before the c-th operator. It is possible if no tensor is changed in place on one side and used
on the other. It is good if few bytes cross: between two uses of weights, the position with the fewest crossing bytes is
a candidate, and a candidate is used if its neighbours are not much cheaper. A value that crosses several segments is
carried through them.

Where an architecture says itself before which modules it is cut, these are the cuts, as far as the trace allows them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from runner.model.traced.aliasing import ALIASING
from runner.model.traced.operators import Program

__all__ = [
    "align",
    "crossing",
    "cut_before",
    "cuts_before",
    "effects",
    "good_cuts",
    "draws_with",
    "is_random",
    "module_path",
]

_MOST_OVER_A_NEIGHBOUR = 1.3  # a cut that carries this many times the bytes of a neighbour lies inside a block
_ENTERED = ("_vmap_increment_nesting", "_jvp_increment_nesting", "_enter_dual_level")  # by torch.func's transforms
_LEFT = ("_vmap_decrement_nesting", "_jvp_decrement_nesting", "_exit_dual_level")
_ACROSS = "A tensor is changed in place across it, or it lies within what torch.func transforms"
_STATISTICS = ("batch_norm", "instance_norm")  # change their buffers although their schema does not say so
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def module_path(node: Node) -> str:
    """Path of the innermost module of the user's model that ran the operator; empty for the model itself."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return str(stack[-1][0]) if stack else ""


def _module_paths(node: Node) -> list[str]:
    """Paths of all modules of the user's model that were running when the operator ran."""
    return [str(path) for path, _ in node.meta.get("nn_module_stack", {}).values()]


def good_cuts(training: Program, evaluation: Program, wanted: int) -> list[int]:
    """Positions of the training program where a cut is cheap; all candidates if there are fewer than ``wanted``."""
    costs = _crossing_bytes(training)
    possible = _possible(training, evaluation)
    uses = _uses(training)
    candidates = []
    for before, after in zip(uses, uses[1:], strict=False):
        between = [cut for cut in range(before + 1, after + 1) if cut in possible]
        if between:
            candidates.append(min(between, key=lambda cut: (costs[cut], -cut)))
    good = [cut for i, cut in enumerate(candidates) if costs[cut] <= _allowed(candidates, costs, i)]
    return good if len(good) >= wanted else candidates


def _allowed(candidates: Sequence[int], costs: Sequence[int], index: int) -> float:
    beside = [costs[candidates[i]] for i in (index - 1, index + 1) if 0 <= i < len(candidates)]
    return _MOST_OVER_A_NEIGHBOUR * min(beside) if beside else float("inf")


def _uses(program: Program) -> list[int]:
    """The positions of the operators that use weights."""
    return [i for i, node in enumerate(program.nodes) if any(arg in program.weights for arg in node.all_input_nodes)]


def cuts_before(training: Program, evaluation: Program, modules: Iterable[str]) -> list[int]:
    """The positions of the named modules' first operators, in order, as far as the model can be cut there.

    There are uses of weights before the first cut, between two, and after the last one.
    """
    starts: dict[str, int] = {}
    for position, node in enumerate(training.nodes):
        for path in _module_paths(node):
            starts.setdefault(path, position)
    possible, uses = _possible(training, evaluation), _uses(training)
    cuts = sorted(starts[module] for module in modules if starts.get(module) in possible)
    after = {bisect_right(uses, cut - 1): cut for cut in cuts}  # how many uses of weights are before: the last cut
    return [cut for count, cut in after.items() if 0 < count < len(uses)]


def cut_before(training: Program, evaluation: Program, module: str) -> int | str:
    """The position of a module's first operator or, as text, the reason why the model cannot be cut there."""
    for position, node in enumerate(training.nodes):
        if module in _module_paths(node):
            before = training.nodes[:position]
            if not any(argument in training.weights for each in before for argument in each.all_input_nodes):
                return "No weights are used before it"
            if position in training.uncut:
                return "It lies among layers that ranks divide, who do not have all values in common there"
            return position if position in _possible(training, evaluation) else _ACROSS
    return "No operator of such a module runs"


def _possible(training: Program, evaluation: Program) -> set[int]:
    aligned = align(training, evaluation)
    held = _held_together(training)
    held_evaluating = held if evaluation is training else _held_together(evaluation)
    return {cut for cut in aligned if cut not in held and aligned[cut] not in held_evaluating}


def align(training: Program, evaluation: Program) -> dict[int, int]:
    """Positions that the training and the evaluation program share: position in the first to position in the second."""

    def keys(program: Program) -> list[tuple[str, str]]:
        return [(str(node.target), module_path(node)) for node in program.nodes]

    ours, theirs = keys(training), keys(evaluation)
    if ours == theirs:
        return {cut: cut for cut in range(1, len(ours))}
    found: dict[int, int] = {}
    for block in SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks():
        for offset in range(block.size + 1):  # before each matched operator, and after the last one
            found.setdefault(block.a + offset, block.b + offset)
    return {cut: other for cut, other in found.items() if 0 < cut < len(ours) and 0 < other < len(theirs)}


# What crosses


def _lifetimes(program: Program) -> dict[Node, tuple[int, int]]:
    """For each value, the position that makes it (-1: the input) and that of its last use (the length: the output)."""
    positions = {node: i for i, node in enumerate(program.nodes)}
    values = [node for node in program.inputs if isinstance(node, Node)]
    values += [node for node in program.nodes if node.op != "get_attr"]
    last = {value: positions.get(value, -1) for value in values}
    for i, node in enumerate(program.nodes):
        last |= {used: i for used in node.all_input_nodes if used in last}
    last |= {out: len(program.nodes) for out in program.outputs if isinstance(out, Node) and out in last}
    return {value: (positions.get(value, -1), last[value]) for value in values}


def crossing(program: Program, cuts: Iterable[int]) -> list[list[Node]]:
    """For each cut, the values made before it and used after it, in the order in which they were made."""
    lifetimes = _lifetimes(program)
    return [[value for value, (made, used) in lifetimes.items() if made < cut <= used] for cut in cuts]


def _crossing_bytes(program: Program) -> list[int]:
    changes = [0] * (len(program.nodes) + 2)
    for value, (made, used) in _lifetimes(program).items():
        num_bytes = _num_bytes(value.meta.get("val"))
        changes[made + 1] += num_bytes
        changes[used + 1] -= num_bytes
    return list(accumulate(changes))


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        elements = 1
        for size in value.shape:
            elements *= _hint(size)
        return elements * value.element_size()
    if isinstance(value, tuple | list):
        return sum(_num_bytes(item) for item in value)
    return 8


def _hint(size: Any) -> int:
    """The value of a symbolic size in the traced batch."""
    if isinstance(size, torch.SymInt):
        hint = size.node.hint
        return int(hint) if hint is not None else 1
    return int(size)


# What cannot be cut


def _held_together(program: Program) -> set[int]:
    """Positions where a cut would separate a tensor that is changed in place from its other uses, or ranks' parts.

    So would one within a function that torch.func transforms, whose values are those of no tensor outside of it.
    """
    positions = {node: i for i, node in enumerate(program.nodes)}
    parent: dict[Node, Node] = {}

    def root(node: Node) -> Node:
        while (above := parent.get(node, node)) is not node:
            node = above
        return node

    changed: list[tuple[Node, int]] = []
    for i, node in enumerate(program.nodes):
        aliases, written = effects(node, program)
        for other in (*aliases, *written):
            if other in aliases:
                parent[root(node)] = root(other)
        changed += [(each, i) for each in written]
    groups: dict[Node, list[Node]] = {}
    for node in (*program.weights, *(n for n in program.inputs if isinstance(n, Node)), *program.nodes):
        groups.setdefault(root(node), []).append(node)
    held, transforms = set(program.uncut), 0
    for i, node in enumerate(program.nodes):
        if transforms:
            held.add(i)
        name = getattr(node.target, "__name__", "")
        transforms += (name in _ENTERED) - (name in _LEFT)
    for node, position in changed:
        members = groups.get(root(node), [node])
        is_weight = any(member in program.weights for member in members)
        used = [positions[user] for member in members for user in member.users if user in positions]
        made = [positions.get(member, -1) for member in members if member not in program.weights]
        first, last = (min(used), max(used)) if is_weight else (min(made), position)
        held.update(range(first + 1, last + 1))
    return held


def effects(node: Node, program: Program) -> tuple[list[Node], list[Node]]:
    """The arguments whose memory the result may share, and the arguments that the operator changes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return (list(node.all_input_nodes), []) if "getitem" in str(node.target) else ([], [])
    schema = node.target._schema
    shares = any(result.alias_info is not None for result in schema.returns)
    shares = shares or any(name in schema.name for name in ALIASING)
    aliases, written = [], []
    for number, argument in enumerate(schema.arguments):
        given = node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        members = [each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, Node)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += members
        if shares and (argument.alias_info is not None or any(name in schema.name for name in ALIASING)):
            aliases += members
    if any(name in schema.name for name in _STATISTICS):
        written += [each for each in node.all_input_nodes if "running" in program.weights.get(each, "")]
    return aliases, written


# Random numbers


def is_random(node: Node, owner: torch.nn.Module) -> bool:
    """Whether the operator draws random numbers with its present arguments; disabled dropout does not."""
    if node.op == "get_attr":
        held = getattr(owner, str(node.target), None)
        return isinstance(held, torch.fx.GraphModule) and any(is_random(each, held) for each in held.graph.nodes)
    return isinstance(node.target, torch._ops.OpOverload) and draws_with(node.target, node.args, node.kwargs)


def draws_with(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments."""
    given = {a.name: v for a, v in zip(target._schema.arguments, args, strict=False)} | dict(kwargs)
    if any(name in target._schema.name for name in _RECURRENT):
        return bool(given.get("train")) and bool(given.get("dropout") != 0.0)
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if "dropout_p" in {argument.name for argument in target._schema.arguments}:
        return bool(given.get("dropout_p", 0.0) != 0.0)
    return given.get("train", True) is not False and bool(given.get("p", 1.0) != 0.0)
