"""How a divided dimension passes through an operator, or why it cannot.

Each rule takes the shapes of the whole values. A rule says which dimension of the result is divided, and notes what
must change in the operator for a rank's part: literal sizes, whole operands that must be cut, and whole operands whose
gradients the ranks' parts must share. What no rule knows is a :class:`Conflict`, and the weights stay whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from runner.model.sharded.graph import arguments, operator
from runner.model.sharded.shape_rules import SHAPE_RULES
from runner.model.sharded.splits import Conflict, Rule, Split, Splits, Walk, all_origins, check_operand

__all__ = ["follow"]


def follow(walk: Walk, node: Node) -> Splits:
    """How the result of an operator is divided, of which an operand is.

    Raises:
        Conflict: it needs the operand whole.
    """
    divided = [split for each in node.all_input_nodes if (split := walk.split(each)) is not None]
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        raise Conflict(f"{node.name} is not followed", divided[0].origins)
    given, kind = arguments(node), operator(node).removeprefix("aten::")
    split = walk.split(given["self"]) if isinstance(given.get("self"), Node) else None
    if torch.Tag.nondeterministic_seeded in target.tags and kind not in ("dropout", "scaled_dot_product_attention"):
        raise Conflict(f"{node.name} draws random numbers for divided features", divided[0].origins)
    if torch.Tag.pointwise in target.tags or kind in _POINTWISE:
        return _pointwise(walk, node, given, divided[0])
    if kind not in _RULES or target._overloadname in ("dtype", "Dimname", "names_dim"):
        raise Conflict(f"{kind} of divided features is not followed", divided[0].origins)
    return _RULES[kind](walk, node, given, split or divided[0])


def _pointwise(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    source = next(each for each in node.all_input_nodes if walk.split(each) is not None)
    shape = walk.graph.shape(node)
    distance = len(walk.graph.shape(source)) - split.dim
    if node.target._schema.is_mutable and walk.split(given["self"]) is None:  # type: ignore[union-attr]
        raise Conflict(f"{node.name} changes a whole value", split.origins)
    for operand in node.all_input_nodes:
        if isinstance(operand.meta.get("val"), torch.Tensor):
            check_operand(walk, node, operand, split, distance)
    return Split(len(shape) - distance, split.pieces, all_origins(walk, node.all_input_nodes))


def _along(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    """Operators that compute along dimensions, and drop them or not."""
    count, kind = len(walk.graph.shape(given["self"])), operator(node).removeprefix("aten::")
    asked = given.get("dim")
    if asked is None or (isinstance(asked, list | tuple) and not asked):
        raise Conflict(f"{kind} over the divided features", split.origins)
    dims = {dim % count for dim in (asked if isinstance(asked, list | tuple) else (asked,))}
    if split.dim in dims:
        raise Conflict(f"{kind} over the divided features", split.origins)
    if len(walk.graph.shape(node)) == count:
        return split
    return Split(split.dim - sum(dim < split.dim for dim in dims), split.pieces, split.origins)


def _norm(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    kind, value = operator(node).removeprefix("aten::"), given["input"]
    found = walk.split(value)
    if found is None:
        raise Conflict(f"{kind} of a whole value", split.origins)
    if found.dim >= len(walk.graph.shape(value)) - len(given["normalized_shape"]):
        raise Conflict(f"{kind} over the divided features", found.origins)
    for name in ("weight", "bias"):
        if isinstance(given.get(name), Node):
            walk.enter(node, given[name])
    return found


def _batched(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    """Products of two values: over a dimension that both have, or over one that only one of them has."""
    kind = operator(node).removeprefix("aten::")
    first, second = {
        "matmul": ("self", "other"),
        "bmm": ("self", "mat2"),
        "mm": ("self", "mat2"),
        "baddbmm": ("batch1", "batch2"),
    }[kind]
    values = given[first], given[second]
    shape, shapes = walk.graph.shape(node), [walk.graph.shape(value) for value in values]
    if any(len(each) < 2 for each in shapes):
        raise Conflict(f"{kind} of divided features is not followed", all_origins(walk, values))
    source = 0 if walk.split(values[0]) is not None else 1
    found = walk.split(values[source])
    if found is None:
        raise Conflict(f"{kind} adds divided features to whole ones", split.origins)
    distance, other = len(shapes[source]) - found.dim, values[1 - source]
    if distance > 2:
        check_operand(walk, node, other, found, distance)
    elif distance == 1 + source:  # the dimension over which it sums
        raise Conflict(f"{kind} sums over the divided features", all_origins(walk, values))
    elif walk.split(other) is not None:
        raise Conflict(f"{node.name} meets values that are divided in different ways", all_origins(walk, values))
    elif other in walk.graph.differentiable:  # the ranks would sum gradients as large as this value, which is no weight
        raise Conflict(f"{node.name} reads it beside {other.name}, which is whole", found.origins, operand=other)
    made = Split(len(shape) - distance, found.pieces, all_origins(walk, node.all_input_nodes))
    if kind == "baddbmm":
        check_operand(walk, node, given["self"], made, distance)
    return made


def _attention(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    values = [given[name] for name in ("query", "key", "value")]
    for value in values:
        found = walk.split(value)
        if found is not None and len(walk.graph.shape(value)) - found.dim < 3:
            raise Conflict("attention over a divided head", found.origins)
    source = next(value for value in values if walk.split(value) is not None)
    found = walk.split(source)
    assert found is not None
    distance = len(walk.graph.shape(source)) - found.dim
    for value in values:
        check_operand(walk, node, value, found, distance)
    if isinstance(given["attn_mask"], Node):
        check_operand(walk, node, given["attn_mask"], found, distance)
    return Split(found.dim, found.pieces, all_origins(walk, values))


_POINTWISE = {"alias", "clone", "contiguous", "copy_", "detach", "dropout", "hardswish", "log_sigmoid", "masked_fill"}
_POINTWISE |= {"multiply", "ones_like", "to", "type_as", "where", "zeros_like", "__and__", "__or__", "gelu_", "relu6"}
_RULES: dict[str, Rule] = SHAPE_RULES | {
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "cumsum", "mean", "sum", "amax", "amin", "var"), _along),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm),
    **dict.fromkeys(("matmul", "bmm", "mm", "baddbmm"), _batched),
    "scaled_dot_product_attention": _attention,
}
