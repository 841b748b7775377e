"""Finds chains of operators in a trace that one operator can stand for, and puts it there.

A chain ends in one value; everything else that it computes is read within it alone. So nothing is computed twice in
the forward, and no value that something else needs is left out.

- ``norm``: torch's RMS norm, or a chain with a mean or variance over the last axis and the root of what follows.
- ``elementwise``: a chain of operators on single elements, at least one of which is no sum or product and two of which
  keep something for their backward. A chain of sums keeps nothing, and as one operator would keep all that it reads.

Layer norm is one operator in torch, and dropout draws numbers, so that both stay what they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

import runner.model.kernels.operators as operators
from runner.model.sharded.graph import operator
from runner.model.traced.operators import Program

__all__ = ["fused"]

_SUMS = {f"aten::{name}" for name in ("add", "sub", "neg", "rsub", "to", "clone", "type_as", "float")}
_PRODUCTS = {f"aten::{name}" for name in ("mul", "div", "square", "reciprocal")}
_OTHERS = {
    f"aten::{name}"
    for name in (
        "tanh", "sigmoid", "gelu", "silu", "relu", "mish", "softplus", "elu", "selu", "celu", "leaky_relu",
        "hardswish", "hardsigmoid", "hardtanh", "relu6", "log_sigmoid", "erf", "exp", "expm1", "log", "log1p", "sqrt",
        "rsqrt", "pow", "abs", "clamp", "clamp_min", "clamp_max", "sin", "cos",
    )
}  # fmt: skip
_ELEMENTWISE = _SUMS | _PRODUCTS | _OTHERS
_ROOTS = {"aten::rsqrt", "aten::sqrt", "aten::pow"}
_STATISTICS = {"aten::mean", "aten::var"}
_NORMS = frozenset({"aten::rms_norm"})
Make = Callable[[Sequence[Node], Sequence[Node], GraphModule], Node | None]
_FEWEST_KEPT = 2  # operators that keep something: below, one operator would keep as much


def fused(
    program: Program, wanted: frozenset[str], make: Make | None = None, norms: frozenset[str] = _NORMS
) -> tuple[Program, frozenset[str]]:
    """The program with its chains as single operators, and the kinds that were found. The program's graph is changed.

    Args:
        program: a trace, before it is cut.
        wanted: ``norm``, ``elementwise`` or both.
        make: makes the operator behind a chain, from what it reads and from the chain alone, or finds none; None: its
            code is compiled.
        norms: the operators that are norms by themselves.
    """
    found: set[str] = set()
    work = _Work(program, make or _compiled, norms)
    for kind in ("norm", "elementwise"):  # the chain of a norm may have what makes an elementwise one
        for sink in reversed(program.nodes):
            chain = [] if sink in work.known else work.chain(sink, kind)
            if chain and kind in wanted and work.replace(chain, sink):
                found.add(kind)
            work.known |= set(chain)
    return (work.finished(), frozenset(found)) if found else (program, frozenset())


class _Work:
    """A program of which some chains are single operators already.

    Args:
        program: the program as it was.
        make, norms: see :func:`fused`.

    Attributes:
        taken: the operators in whose place there is another one.
        known: the operators that are in chains, whether they are wanted or not.
    """

    def __init__(self, program: Program, make: Make, norms: frozenset[str]) -> None:
        self._program, self._make, self._norms = program, make, norms
        self._places = {node: place for place, node in enumerate(program.nodes)}
        self._made: dict[Node, Node] = {}  # by the last operator of its chain
        self.taken: set[Node] = set()
        self.known: set[Node] = set()

    def chain(self, sink: Node, kind: str) -> list[Node]:
        """The operators of a chain that ends in a node, in their order; none if there is no chain of this kind."""
        if kind == "norm" and operator(sink) in self._norms and _is_single(sink):
            return [sink]
        allowed = _ELEMENTWISE | (_STATISTICS if kind == "norm" else set())
        if not _may_be_in(sink, allowed):
            return []
        chain = {sink}
        for node in reversed(self._program.nodes[: self._places[sink]]):
            if self._is_read_within(node, chain) and node not in self.known and _may_be_in(node, allowed):
                chain.add(node)
        trimmed = _trimmed(chain, sink)
        ordered = sorted(trimmed, key=self._places.__getitem__)
        is_one = _is_norm(trimmed) if kind == "norm" else _is_worth_it(trimmed)
        return ordered if ordered and is_one and not self._changes_between(ordered[0], sink) else []

    def _is_read_within(self, node: Node, chain: set[Node]) -> bool:
        made = set(self._made.values())
        users = {user for user in node.users if user in made or (user in self._places and user not in self.taken)}
        return bool(users) and users <= chain and node not in self._program.outputs

    def _changes_between(self, first: Node, last: Node) -> bool:
        """Whether something is changed in place from a chain's first operator to its last: what it reads may be."""
        between = self._program.nodes[self._places[first] : self._places[last]]
        targets = (node.target for node in between if node.op == "call_function")
        return any(isinstance(each, torch._ops.OpOverload) and each._schema.is_mutable for each in targets)

    def replace(self, chain: Sequence[Node], sink: Node) -> bool:
        """Put one operator in the place of a chain; whether there is one."""
        made = self._make(chain, *_alone(chain))
        if made is None:
            return False
        made.meta = dict(sink.meta)
        sink.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        self._made[sink] = made
        self.taken |= set(chain)
        return True

    def finished(self) -> Program:
        """The program with its chains as single operators."""
        made, nodes = self._made, self._program.nodes
        left = tuple(made.get(node, node) for node in nodes if node in made or node not in self.taken)
        outputs = tuple(made.get(each, each) if isinstance(each, Node) else each for each in self._program.outputs)
        return replace(self._program, nodes=left, outputs=outputs)


def _trimmed(chain: set[Node], sink: Node) -> set[Node]:
    """The chain without the sums at its ends, such as those of a residual, which keep nothing by themselves."""
    if operator(sink) in _SUMS:
        return set()  # a chain that ends before the sum is found from its own end
    left = set(chain)
    while True:
        entries = {
            node for node in left if operator(node) in _SUMS and not any(given in left for given in _tensors(node))
        }
        joins = {node for node in entries if len(_tensors(node)) > 1}
        if not joins:
            return left
        left -= joins


def _may_be_in(node: Node, allowed: set[str]) -> bool:
    if node.op != "call_function" or operator(node) not in allowed or not _is_single(node):
        return False
    if operator(node) in _STATISTICS and not _is_over_last_axis(node):
        return False
    return all(_has_symbols(given.meta.get("val")) for given in node.all_input_nodes)


def _is_single(node: Node) -> bool:
    """Whether an operator gives one floating-point tensor of known form, and changes nothing in place."""
    target: Any = node.target
    value: Any = node.meta.get("val")
    assert isinstance(target, torch._ops.OpOverload)
    return _has_symbols(value) and bool(value.is_floating_point()) and not target._schema.is_mutable


def _has_symbols(value: Any) -> bool:
    """Whether a traced value has symbols for its unknown sizes; what ranks divide has sizes of the traced batch."""
    mode = getattr(value, "fake_mode", None)
    return mode is not None and mode.shape_env is not None


def _is_over_last_axis(node: Node) -> bool:
    given = node.all_input_nodes[0].meta["val"]
    axes = next((each for each in node.args[1:] if isinstance(each, list | tuple)), None)
    keeps = True in node.args or node.kwargs.get("keepdim", False) is True
    return axes is not None and [axis % given.dim() for axis in axes] == [given.dim() - 1] and keeps


def _is_norm(chain: set[Node]) -> bool:
    names = {operator(node) for node in chain}
    return not names.isdisjoint(_STATISTICS) and not names.isdisjoint(_ROOTS)


def _is_worth_it(chain: set[Node]) -> bool:
    kept = [node for node in chain if operator(node) in _OTHERS or _multiplies(node)]
    return len(kept) >= _FEWEST_KEPT and any(operator(node) in _OTHERS for node in chain)


def _multiplies(node: Node) -> bool:
    """Whether an operator multiplies two tensors, so that it keeps both; by a number it keeps none."""
    return operator(node) in _PRODUCTS and len(_tensors(node)) > 1


def _tensors(node: Node) -> list[Node]:
    return list(node.all_input_nodes)


def _alone(chain: Sequence[Node]) -> tuple[list[Node], GraphModule]:
    """What a chain reads, and the chain as a graph of its own, which takes that one by one."""
    inside = set(chain)
    given = list(dict.fromkeys(each for node in chain for each in node.all_input_nodes if each not in inside))
    graph, copies = Graph(), {}
    for number, node in enumerate(given):
        copies[node] = graph.placeholder(f"value_{number}")
    for node in chain:
        copies[node] = graph.node_copy(node, lambda old: copies[old])
        copies[node].meta, copies[node].name = {}, f"made_{len(copies)}"
    graph.output(copies[chain[-1]])
    return given, GraphModule({}, graph)


def _compiled(chain: Sequence[Node], given: Sequence[Node], graph: GraphModule) -> Node:
    """An operator behind a chain whose compiled code computes what the chain does."""
    examples = tuple(node.meta["val"] for node in given)
    key = _key(graph, examples)
    operators.register(key, operators.Chain(graph, examples))
    with chain[-1].graph.inserting_after(chain[-1]):
        return chain[-1].graph.call_function(torch.ops.runner_kernels.chain.default, (list(given), key))


def _key(module: GraphModule, examples: Sequence[Tensor]) -> str:
    """A text that is equal for two chains which compute the same on tensors of the same forms."""
    symbols: dict[str, str] = {}
    forms = [(str(each.dtype), tuple(_sizes(each, symbols)), tuple(map(str, each.device.type))) for each in examples]
    places = {node: number for number, node in enumerate(module.graph.nodes)}
    steps = [
        (node.op, str(node.target), _shown(node.args, places), _shown(node.kwargs, places))
        for node in module.graph.nodes
        if node.op != "placeholder"
    ]
    return hashlib.sha256(repr((forms, steps)).encode()).hexdigest()[:16]


def _sizes(example: Tensor, symbols: dict[str, str]) -> Iterator[str]:
    """The sizes of a tensor; unknown ones are numbered in their order, whatever a trace calls them."""
    for size in example.shape:
        known = not isinstance(size, torch.SymInt)
        yield str(size) if known else symbols.setdefault(str(size), f"n{len(symbols)}")


def _shown(value: Any, places: Mapping[Node, int]) -> str:
    return repr(torch.fx.node.map_arg(value, lambda node: f"%{places[node]}"))
