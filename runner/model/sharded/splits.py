"""What is said of a value of which each rank has a part, and of why that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.fx import Node

from runner.model.sharded.graph import Graph

__all__ = ["Conflict", "Divided", "Rule", "Split", "Splits", "Walk", "all_origins", "check_operand"]


@dataclass(frozen=True)
class Split:
    """A value of which each rank has a part.

    Args:
        dim: the divided dimension.
        pieces: the number of blocks, one behind the other, of each of which a rank has a part.
        origins: the column products from which it comes.
    """

    dim: int
    pieces: int
    origins: frozenset[Node]


Splits = Split | tuple[Split, ...] | None


@dataclass(frozen=True)
class Divided:
    """A size in an operator's arguments of which a rank has a part."""

    size: Any


class Conflict(Exception):
    """A divided value meets an operator that needs it whole.

    Args:
        reason: what cannot be done, for the reader.
        origins: the column products from which the value comes.
        factor: into how many times as many pieces their weights must be cut for this operator to work; 0: none helps.
        operand: a whole operand that would have to be divided, too.
    """

    def __init__(self, reason: str, origins: frozenset[Node], factor: int = 0, operand: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.origins, self.factor, self.operand = reason, origins, factor, operand


class Walk(Protocol):
    """What a rule asks and tells: see :class:`runner.model.sharded.regions.Region`."""

    graph: Graph
    degree: int

    def split(self, node: Node) -> Split | None:
        """How a node's only value is divided."""
        ...

    def edit(self, node: Node, name: str, value: Any) -> None:
        """Note that a rank gives an operator another argument."""
        ...

    def enter(self, node: Node, operand: Node) -> None:
        """Note that an operator reads a whole value beside divided ones, so its gradient is a part on each rank."""
        ...

    def cut(self, node: Node, operand: Node, dim: int, pieces: int) -> bool:
        """Note that a rank needs its part of a whole operand. False: that cannot be had."""
        ...


Rule = Callable[[Walk, Node, dict[str, Any], Split], Splits]


def check_operand(walk: Walk, node: Node, operand: Node, split: Split, distance: int) -> None:
    """Let an operator read another operand beside one that is divided ``distance`` dimensions from the end.

    Raises:
        Conflict: they do not fit.
    """
    shape, other = walk.graph.shape(operand), walk.split(operand)
    dim = len(shape) - distance
    if other is not None:
        if other.dim != dim or other.pieces != split.pieces:
            raise Conflict(
                f"{node.name} meets values that are divided in different ways", split.origins | other.origins
            )
    elif dim < 0 or shape[dim] == 1:
        walk.enter(node, operand)
    elif not walk.cut(node, operand, dim, split.pieces):
        reason = f"{node.name} reads it beside {operand.name}, which is whole"
        raise Conflict(reason, split.origins, operand=operand)


def all_origins(walk: Walk, nodes: Sequence[Node]) -> frozenset[Node]:
    """The column products from which some values come."""
    found = [split.origins for node in nodes if (split := walk.split(node)) is not None]
    return frozenset().union(*found)
