"""How a divided dimension passes through operators that shape values anew, or take them apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import Any

from torch.fx import Node

from runner.model.sharded.graph import operator
from runner.model.sharded.splits import Conflict, Divided, Rule, Split, Splits, Walk, all_origins, check_operand

__all__ = ["SHAPE_RULES"]


def _view(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    """A rank's part is told by the distance of its elements: whatever keeps that within one dimension divides that."""
    shape, made = walk.graph.shape(given["self"]), walk.graph.shape(node)
    inner = shape[split.dim] // (split.pieces * walk.degree) * prod(shape[split.dim + 1 :])
    outer = inner * walk.degree
    for dim, size in enumerate(made):
        stride = prod(made[dim + 1 :])
        if not stride < outer <= stride * size:
            continue
        if inner % stride == 0 and stride * size % outer == 0:
            _divide_literal(walk, node, given, dim, len(made))
            return Split(dim, stride * size // outer, split.origins)
        count = outer // stride if outer % stride == 0 else size
        factor = outer // stride if outer % stride == 0 and not walk.graph.is_unknown(outer // stride) else 0
        reason = f"{node.name} makes {count} of the features, which {walk.degree} does not divide"
        raise Conflict(reason, split.origins, factor)
    raise Conflict(f"{node.name} merges the divided features with others", split.origins)


def _divide_literal(walk: Walk, node: Node, given: dict[str, Any], dim: int, count: int) -> None:
    name = next((each for each in ("size", "shape", "sizes") if each in given), None)
    if name is None:  # flatten has no literal sizes
        return
    sizes = list(given[name])
    if operator(node) == "aten::unflatten":
        dim -= given["dim"] % len(walk.graph.shape(given["self"]))
    elif len(sizes) != count:
        raise Conflict(f"{node.name} is not followed", all_origins(walk, [given["self"]]))
    if 0 <= dim < len(sizes) and sizes[dim] != -1:
        sizes[dim] = Divided(sizes[dim])
        walk.edit(node, name, sizes)


def _expand(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    made = walk.graph.shape(node)
    dim = len(made) - len(walk.graph.shape(given["self"])) + split.dim
    _divide_literal(walk, node, given, dim, len(made))
    return Split(dim, split.pieces, split.origins)


def _order(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    count = len(walk.graph.shape(node))
    order = list(range(count))
    kind = operator(node).removeprefix("aten::")
    if kind == "permute":
        order = [dim % count for dim in given["dims"]]
    elif kind in ("t", "numpy_T"):
        order.reverse()
    else:
        first, second = ([value for name, value in given.items() if name != "self"])[:2]
        order[first % count], order[second % count] = second % count, first % count
    return Split(order.index(split.dim), split.pieces, split.origins)


def _unsqueeze(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    at = given["dim"] % len(walk.graph.shape(node))
    return Split(split.dim + (at <= split.dim), split.pieces, split.origins)


def _squeeze(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    shape = walk.graph.shape(given["self"])
    asked = given.get("dim")
    dims = [asked] if isinstance(asked, int) else asked
    if dims is None:
        raise Conflict(f"{node.name} drops dimensions by their size", split.origins)
    dropped = {dim % len(shape) for dim in dims if shape[dim] == 1}
    return Split(split.dim - sum(dim < split.dim for dim in dropped), split.pieces, split.origins)


# Parts of a dimension


def _need_pieces(split: Split, factor: int, node: Node) -> Conflict:
    return Conflict(f"{node.name} takes the divided features apart", split.origins, factor)


def _parts(walk: Walk, node: Node, split: Split, starts: Sequence[int], size: int) -> int:
    """The size of a block of a dimension that is taken apart at ``starts``.

    Raises:
        Conflict: these do not fall between two blocks.
    """
    block = size // split.pieces
    wanted = gcd(block, *starts)
    if wanted != block:
        raise _need_pieces(split, block // wanted, node)
    return block


def _split(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Splits:
    shape, count = walk.graph.shape(given["self"]), len(node.meta["val"])
    if given["dim"] % len(shape) != split.dim:
        return (split,) * count
    lengths = [walk.graph.shape_of(part)[split.dim] for part in node.meta["val"]]
    block = _parts(walk, node, split, lengths, shape[split.dim])
    for name in ("split_size", "split_sizes"):
        if name in given:
            asked = given[name]
            walk.edit(
                node, name, [Divided(each) for each in asked] if isinstance(asked, list | tuple) else Divided(asked)
            )
    return tuple(Split(split.dim, length // block, split.origins) for length in lengths)


def _take(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Splits:
    """``select`` and ``unbind``, which drop a dimension."""
    shape = walk.graph.shape(given["self"])
    dim = given["dim"] % len(shape)
    if dim == split.dim:
        raise _need_pieces(split, shape[dim] // split.pieces, node)
    made = Split(split.dim - (dim < split.dim), split.pieces, split.origins)
    return made if operator(node) == "aten::select" else (made,) * shape[dim]


def _slice(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    shape = walk.graph.shape(given["self"])
    if given["dim"] % len(shape) != split.dim:
        return split
    size, made = shape[split.dim], walk.graph.shape(node)[split.dim]
    start, end, step = given["start"], given["end"], given["step"]
    if made == size and step == 1:
        return split
    if step != 1 or walk.graph.is_unknown(size) or not all(isinstance(each or 0, int) for each in (start, end)):
        raise Conflict(f"{node.name} takes some of the divided features", split.origins)
    start = min(max((start or 0) + size * ((start or 0) < 0), 0), size)
    block = _parts(walk, node, split, (start, made), size)
    walk.edit(node, "start", Divided(start))
    walk.edit(node, "end", Divided(start + made))
    return Split(split.dim, made // block, split.origins)


def _glu(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    shape = walk.graph.shape(given["self"])
    if given["dim"] % len(shape) != split.dim:
        return split
    _parts(walk, node, split, (shape[split.dim] // 2,), shape[split.dim])
    return Split(split.dim, split.pieces // 2, split.origins)


def _cat(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    parts = given["tensors"]
    shape, stacked = walk.graph.shape(node), operator(node) == "aten::stack"
    dim = given["dim"] % len(shape)
    splits = [walk.split(part) for part in parts]
    source = next(part for part, each in zip(parts, splits, strict=True) if each is not None)
    first = walk.split(source)
    assert first is not None
    if dim == first.dim and not stacked:
        sizes = {walk.graph.shape(p)[dim] // s.pieces for p, s in zip(parts, splits, strict=True) if s is not None}
        if None in splits or len(sizes) > 1 or any(each is not None and each.dim != dim for each in splits):
            raise Conflict(f"{node.name} joins the divided features with others", all_origins(walk, parts))
        return Split(dim, sum(each.pieces for each in splits if each is not None), all_origins(walk, parts))
    for part in parts:
        check_operand(walk, node, part, first, len(walk.graph.shape(source)) - first.dim)
    return Split(first.dim + (stacked and dim <= first.dim), first.pieces, all_origins(walk, parts))


def _repeat(walk: Walk, node: Node, given: dict[str, Any], split: Split) -> Split:
    if operator(node) == "aten::repeat":
        repeats = given["repeats"]
        dim = len(repeats) - len(walk.graph.shape(given["self"])) + split.dim
        if repeats[dim] != 1:
            raise Conflict(f"{node.name} repeats the divided features", split.origins)
        return Split(dim, split.pieces, split.origins)
    if not isinstance(given.get("repeats"), int) or given["dim"] is None or given.get("output_size") is not None:
        raise Conflict(f"{node.name} repeats the divided features", split.origins)
    return split  # each element stands beside its copies, so that a part's are on the same rank


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), _view),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T", "swapaxes"), _order),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("select", "unbind"), _take),
    **dict.fromkeys(("cat", "concat", "stack"), _cat),
    **dict.fromkeys(("repeat", "repeat_interleave"), _repeat),
    "expand": _expand,
    "glu": _glu,
    "slice": _slice,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
}
