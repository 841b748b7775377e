"""Describes arguments and graphs of operators as values that can be compared, without the names of anything."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["Itself", "described", "structure_of_graph"]

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class Itself:
    """An object that is equal to itself alone. It keeps the object, whose place no other one can take then."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def described(value: Any, known: Callable[[Any], Hashable | None]) -> Hashable:
    """A description of an argument: two of them are equal if the arguments are.

    Args:
        value: numbers, texts and containers are compared by what they hold.
        known: gives the description of a value that it knows, such as a tensor, or None for another.
    """
    own = known(value)
    if own is not None:
        return own
    if isinstance(value, tuple | list):
        return type(value), tuple(described(each, known) for each in value)
    if isinstance(value, Mapping):
        return type(value), tuple((described(key, known), described(each, known)) for key, each in value.items())
    if isinstance(value, slice):
        return slice, described((value.start, value.stop, value.step), known)
    return (type(value), value) if isinstance(value, _PLAIN) else Itself(value)


def structure_of_graph(module: GraphModule) -> Hashable:
    """A value that is equal for two graphs which run the same operators on the same places of their inputs.

    What a graph holds besides operators, such as another graph, is compared by identity.
    """
    places = {node: place for place, node in enumerate(module.graph.nodes)}

    def known(value: Any) -> Hashable | None:
        return (Node, places[value]) if isinstance(value, Node) else None

    def structure_of(node: Node) -> Hashable:
        if node.op == "placeholder":
            return node.op
        target = Itself(getattr(module, str(node.target))) if node.op == "get_attr" else node.target
        return node.op, target, described(node.args, known), described(node.kwargs, known)

    return tuple(map(structure_of, module.graph.nodes))
