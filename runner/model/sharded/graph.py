"""What the finder asks of a traced program: sizes, arguments, matrix products, and which values have gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from runner.model.traced.cuts import effects
from runner.model.traced.operators import Program

__all__ = ["VIEWS", "Graph", "Product", "arguments", "operator", "tensors_of"]

_LEAST = 1_000_000  # larger than the factors of sizes in a model's code
VIEWS = ("aten::view", "aten::reshape", "aten::contiguous", "aten::flatten", "aten::unflatten", "aten::alias")
_TURNS = ("aten::t", "aten::transpose", "aten::permute", "aten::numpy_T", "aten::swapaxes")
_CASTS = ("aten::to", "aten::contiguous", "aten::alias", "aten::type_as")


def operator(node: Node) -> str:
    """The name of a node's operator without its overload, such as ``aten::view``; the name of a plain function."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name)
    return getattr(node.target, "__name__", str(node.target))


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of an operator by name, with the defaults of those that are not given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given: dict[str, Any] = {}
    for number, argument in enumerate(node.target._schema.arguments):
        default = node.kwargs.get(argument.name, argument.default_value)
        given[argument.name] = node.args[number] if number < len(node.args) else default
    return given


def tensors_of(node: Node) -> Iterator[Tensor]:
    """The traced tensors that a node gives."""
    value = node.meta.get("val")
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, Tensor):
            yield each


@dataclass(frozen=True)
class Product:
    """The product of a value with a parameter that is a matrix, and perhaps a bias.

    Args:
        node: the operator.
        value: what is multiplied; its last dimension is contracted.
        weight: the parameter's placeholder.
        chain: nodes that turn or cast the parameter, from its placeholder's user to the product's operand.
        out: the dimension of the parameter that the result has.
        bias: what is added, if anything.
    """

    node: Node
    value: Node
    weight: Node
    chain: tuple[Node, ...]
    out: int
    bias: Node | None

    @property
    def operand(self) -> Node:
        """What the operator multiplies with: the parameter's placeholder or the last of the chain."""
        return self.chain[-1] if self.chain else self.weight


class Graph:
    """A traced program as the finder sees it.

    Args:
        program: one mode of the model.
        model: the model, of which the parameters' identities are asked.
        multiple: divides every unknown size, such as that of the batch.
    """

    def __init__(self, program: Program, model: nn.Module, multiple: int = 1) -> None:
        self.program, self._multiple = program, multiple
        self.positions = {node: position for position, node in enumerate(program.nodes)}
        self._symbols: dict[Any, int] = {}
        self._primes = (
            number for number in count(_LEAST) if all(number % each for each in range(2, isqrt(number) + 1))
        )
        parameters = dict(model.named_parameters(remove_duplicate=False))
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters: Mapping[Node, str] = {
            node: first[id(parameters[name])] for node, name in program.weights.items() if name in parameters
        }
        self.outputs = {node for node in program.outputs if isinstance(node, Node)}

    # Sizes

    def size(self, size: Any) -> int:
        """A size as a number; an unknown one, such as that of the batch, is a product of large primes."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = next(self._primes) * self._multiple
        return int(size.node.expr.subs(self._symbols))

    def shape_of(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a traced tensor as numbers."""
        return tuple(self.size(size) for size in tensor.shape)

    def shape(self, node: Node) -> tuple[int, ...]:
        """The shape of a node's only tensor as numbers."""
        return self.shape_of(node.meta["val"])

    def is_unknown(self, number: int) -> bool:
        """Whether a number depends on an unknown size."""
        return any(number % (size // self._multiple) == 0 for size in self._symbols.values())

    # Matrix products

    @cached_property
    def products(self) -> dict[Node, Product]:
        """The products with parameters, in the order of their operators."""
        found = {node: self._product(node) for node in self.program.nodes if node.op == "call_function"}
        return {node: product for node, product in found.items() if product is not None}

    def _product(self, node: Node) -> Product | None:
        kind = operator(node)
        if kind not in ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul"):
            return None
        given = arguments(node)
        names = {
            "aten::linear": ("input", "weight", "bias", 0),
            "aten::addmm": ("mat1", "mat2", "self", 1),
            "aten::mm": ("self", "mat2", "", 1),
            "aten::matmul": ("self", "other", "", 1),
        }
        value, operand, bias, out = names[kind]
        if kind == "aten::addmm" and (given["alpha"], given["beta"]) != (1, 1):
            return None
        found = self._matrix(given[operand])
        if found is None or len(self.shape(given[value])) < 2:
            return None
        weight, chain, turned = found
        return Product(node, given[value], weight, chain, 1 - out if turned else out, given.get(bias))

    def _matrix(self, node: Node) -> tuple[Node, tuple[Node, ...], bool] | None:
        """The parameter behind an operand, if that is one that is at most turned and cast, and whether it is turned."""
        chain: list[Node] = []
        turned = False
        while node.op == "call_function" and operator(node) in (*_TURNS, *_CASTS) and len(self.shape(node)) == 2:
            chain.insert(0, node)
            turned ^= operator(node) in _TURNS
            if operator(node) in ("aten::transpose", "aten::permute", "aten::swapaxes") and not _swaps(node):
                turned ^= True
            node = node.all_input_nodes[0]
        known = node in self.parameters and len(self.shape(node)) == 2
        return (node, tuple(chain), turned) if known else None

    # Gradients and changes

    @cached_property
    def differentiable(self) -> set[Node]:
        """The floating-point values that depend on parameters or on the input, which another layer may have made."""
        inputs = [node for node in self.program.inputs if isinstance(node, Node)]
        found = {node for node in (*self.parameters, *inputs) if any(t.is_floating_point() for t in tensors_of(node))}
        for node in self.program.nodes:
            floating = "val" not in node.meta or any(t.is_floating_point() for t in tensors_of(node))
            if floating and operator(node) != "aten::detach" and any(each in found for each in node.all_input_nodes):
                found.add(node)
        return found

    def base(self, node: Node) -> Node:
        """The value of which this one is another view."""
        while node.op == "call_function" and operator(node) in VIEWS:
            node = arguments(node)["self"]
        return node

    @cached_property
    def changes(self) -> dict[Node, list[int]]:
        """Where values are changed in place: for each one of those that share memory, the positions."""
        parent: dict[Node, Node] = {}

        def root(node: Node) -> Node:
            while node in parent:
                node = parent[node]
            return node

        written: list[tuple[Node, int]] = []
        for position, node in enumerate(self.program.nodes):
            aliases, changed = effects(node, self.program)
            for other in aliases:
                if root(node) is not root(other):
                    parent[root(node)] = root(other)
            written += [(each, position) for each in changed]
        found: dict[Node, list[int]] = {}
        for node, position in written:
            found.setdefault(root(node), []).append(position)
        everything = (
            *self.program.weights,
            *self.program.nodes,
            *(n for n in self.program.inputs if isinstance(n, Node)),
        )
        return {node: found[root(node)] for node in everything if root(node) in found}


def _swaps(node: Node) -> bool:
    """Whether a transpose or permutation of a matrix turns it."""
    given = arguments(node)
    if "dims" in given:
        return [dim % 2 for dim in given["dims"]] == [1, 0]
    dims = [value for name, value in given.items() if name != "self"]
    return int(dims[0]) % 2 != int(dims[1]) % 2
