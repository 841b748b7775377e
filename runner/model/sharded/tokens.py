"""Which values of a program ranks can divide by tokens, where each rank has the whole of them otherwise.

Layers that ranks divide by features end in a sum of the ranks' parts. Instead of all of the sum, a rank may take the
tokens that are its own: of [samples, tokens, features], every 1/N-th. What follows is computed for these tokens alone,
as long as its operators do with each token what they do with all of them, such as sums of two values, norms over the
features, dropout. An operator that reads several tokens together gets all of them; so do the next layers that are
divided by features, and there the gradients of all tokens are summed and divided again.

Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch.fx import Node

from runner.model.sharded.emit import traced_size
from runner.model.sharded.follow import follow
from runner.model.sharded.graph import Graph, operator, tensors_of
from runner.model.sharded.splits import Conflict, Split, Splits
from runner.model.traced.cuts import is_random, module_path

__all__ = ["ENTRY", "SUM", "TokensError", "TokenWalk"]

SUM, ENTRY = "runner_shards::all_reduce", "runner_shards::identity"
_WHOLE_AGAIN = (SUM, "runner_shards::all_gather")
_SIZES = ("sym_size", "sym_stride", "sym_numel")
_NO_ORIGIN: frozenset[Node] = frozenset()


class TokensError(ValueError):
    """The tokens of a value cannot be divided."""


@dataclass
class _Notes:
    """What an operator with divided operands needs, see :class:`TokenWalk`."""

    edits: dict[str, Any] = field(default_factory=dict)
    entered: set[Node] = field(default_factory=set)
    owned: dict[Node, int] = field(default_factory=dict)


class TokenWalk:
    """Follows the tokens of a program's values.

    Args:
        graph: the program; unknown sizes in it are multiples of the number of ranks.
        degree: number of ranks.
        inputs: the inputs that come divided, each with the dimension.
        divides: whether sums may be divided; otherwise only what comes divided is.

    Attributes:
        splits: how each value is divided.
        scattered: the sums of which each rank takes a part: the dimension, and for a sum [samples x tokens, features]
            the input that tells the samples, or None.
        notes: what operators on parts need: other arguments (``edits``), whole operands whose gradient is a part on
            each rank (``entered``), and whole operands of which they read the own part (``owned``).
        gathered: places, as (operator, operand), where a divided value is read whole.
        reasons: why tokens are together somewhere, one for each such operator.
    """

    def __init__(self, graph: Graph, degree: int, inputs: Mapping[Node, int], *, divides: bool = True) -> None:
        self.graph, self.degree = graph, degree
        self.splits: dict[Node, Splits] = {node: Split(dim, 1, _NO_ORIGIN) for node, dim in inputs.items()}
        self.scattered: dict[Node, tuple[int, Node | None]] = {}
        self.notes: dict[Node, _Notes] = {}
        self.gathered: set[tuple[Node, Node]] = set()
        self.reasons: list[str] = []
        self._divides = divides
        self._own = _Notes()  # of the present operator

    def run(self) -> None:
        """Follow all operators.

        Raises:
            TokensError: a value that must be read whole is changed in place.
        """
        for node in self.graph.program.nodes:
            place = self._scatters(node)
            divided = [each for each in node.all_input_nodes if self.splits.get(each) is not None]
            if place is not None:
                self.scattered[node] = place
                pieces = 1 if place[1] is None else self.graph.shape(place[1])[0]
                self.splits[node] = Split(place[0], pieces, _NO_ORIGIN)
            elif divided and operator(node) != ENTRY and not self._asks_for_size(node):
                self._follow(node, divided)

    # What rules ask and tell, see :class:`runner.model.sharded.splits.Walk`

    def split(self, node: Node) -> Split | None:
        """How a node's only value is divided."""
        found = self.splits.get(node)
        return found if isinstance(found, Split) else None

    def edit(self, node: Node, name: str, value: Any) -> None:
        """Note that a rank gives an operator another argument."""
        self._own.edits[name] = value

    def enter(self, node: Node, operand: Node) -> None:
        """Note that an operator reads a whole value beside divided ones."""
        if operand in self.graph.differentiable:
            self._own.entered.add(operand)

    def cut(self, node: Node, operand: Node, dim: int, pieces: int) -> bool:
        """Note that a rank needs its part of a whole operand."""
        if pieces == 1:
            self._own.owned[operand] = dim
        return pieces == 1

    # Operators

    def _follow(self, node: Node, divided: Sequence[Node]) -> None:
        self._own = _Notes()
        try:
            self.splits[node] = self._passed(node, divided)
            self.notes[node] = self._own
        except Conflict:
            kind = operator(node).removeprefix("aten::")
            self.reasons.append(
                f"{module_path(node) or 'the model'} has all of them, of which its {kind} reads several"
            )
            for operand in divided:
                if operand in self.graph.changes or not isinstance(self.splits[operand], Split):
                    raise TokensError(f"{kind} reads all tokens of a value that is changed in place") from None
                self.gathered.add((node, operand))

    def _passed(self, node: Node, divided: Sequence[Node]) -> Splits:
        if operator(node) == "getitem":
            parts = self.splits[divided[0]]
            assert isinstance(parts, tuple)
            return parts[cast(int, node.args[1])]
        product = self.graph.products.get(node)
        split = None if product is None else self.split(product.value)
        if product is not None and split is not None and split.dim < len(self.graph.shape(product.value)) - 1:
            for operand in (product.operand, product.bias):
                if operand is not None:
                    self.enter(node, operand)
            return split
        if "val" not in node.meta or not all(isinstance(self.splits[each], Split) for each in divided):
            raise Conflict(f"{node.name} is not followed", _NO_ORIGIN)
        made = follow(self, node)
        for each in made if isinstance(made, tuple) else (made,):
            if each is not None and each.pieces > 1 and each.dim:  # tokens of several values, one behind the other
                raise Conflict(f"{node.name} joins tokens", _NO_ORIGIN)
        return made

    def _asks_for_size(self, node: Node) -> bool:
        return any(operator(node).endswith(name) for name in _SIZES)

    def _scatters(self, node: Node) -> tuple[int, Node | None] | None:
        """Where ranks can take their own tokens of a sum; None if it is none, or has no tokens."""
        if not self._divides or operator(node) != SUM:
            return None
        shape = self.graph.shape(node)
        if len(shape) > 2:  # noqa: PLR2004  # samples, tokens, features
            dim = len(shape) - 2
            _check(node.meta["val"].shape[dim], self.degree)
            return dim, None
        if len(shape) < 2:  # noqa: PLR2004
            return None
        for given in self.inputs():  # [samples x tokens, features]
            sizes = self.graph.shape(given)
            if len(sizes) > 1 and sizes[0] * sizes[1] == shape[0]:
                _check(given.meta["val"].shape[1], self.degree)
                return 0, given
        return None

    def inputs(self) -> Iterator[Node]:
        """The inputs that are tensors with dimensions."""
        for each in self.graph.program.inputs:
            if isinstance(each, Node) and any(tensor.dim() for tensor in tensors_of(each)):
                yield each

    def feature_draws(self) -> Iterator[Node]:
        """The operators that draw random numbers for features of which each rank has a part, between entry and sum."""
        inside: set[Node] = set()
        program = self.graph.program
        for node in program.nodes:
            begins = operator(node) == ENTRY and node.all_input_nodes[0] not in program.weights
            if begins or (operator(node) not in _WHOLE_AGAIN and not inside.isdisjoint(node.all_input_nodes)):
                inside.add(node)
                if is_random(node, program.owner):
                    yield node


def _check(size: Any, degree: int) -> None:
    """Refuse a number of tokens that cannot be divided, in the traced batch."""
    tokens = traced_size(size)
    if tokens % degree:
        raise TokensError(f"{tokens} tokens cannot be divided among {degree} ranks")
