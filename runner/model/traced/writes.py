"""Puts what torch.export writes into buffers at the end of a graph where the written value is made.

What a model's code changes under ``no_grad`` and sets (``self.mean += …``) is changed within a graph of its own, and
once more at the end of the whole graph. There it would hold together all layers in between, and change what they have
saved for their backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.fx import Node

from runner.model.traced.aliasing import ALIASING

__all__ = ["written_early"]


def written_early(nodes: Sequence[Node], weights: Collection[Node]) -> list[Node]:
    """The operators in an order that computes the same.

    Args:
        nodes: operators in the order in which the model runs them.
        weights: the placeholders of parameters and buffers.
    """
    made = list(nodes)
    places = {node: place for place, node in enumerate(made)}
    for node in reversed(nodes):
        if node.target is not torch.ops.aten.copy_.default or node.args[0] not in weights or node.users:
            break  # only those at the end are not the code's own
        buffer, value = node.args[:2]
        assert isinstance(buffer, Node)
        if not isinstance(value, Node):
            continue
        beside = (value, *(user for user in (*buffer.users, *value.users) if user is not node))
        if any(map(_shares_or_writes, beside)):
            continue
        before = [
            place for each in (value, *buffer.users) if each is not node and (place := places.get(each)) is not None
        ]
        made.remove(node)
        made.insert(made.index(nodes[max(before)]) + 1 if before else 0, node)
    return made


def _shares_or_writes(node: Node) -> bool:
    """Whether an operator's result may be over its argument's memory, or it changes an argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False  # a graph of its own, which has already changed what is written at the end
    schema = node.target._schema
    may_share = any(name in schema.name for name in ALIASING)
    return may_share or any(each.alias_info is not None for each in (*schema.arguments, *schema.returns))
