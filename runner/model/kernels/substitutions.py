"""Substitutions in the trace of a layer, each of which computes the same by fewer or cheaper operators.

A substitution is made where its pattern is found, in a copy of the trace, and stays where the copy computes what the
trace computes (:mod:`runner.model.kernels.proof`). Parameters stay what they are, under their names: what several are
put together for is made of them in each forward, and autograd divides its gradient.

Dropout that drops something stays in place in evaluation, too, so that a trace in evaluation is cut where the one in
training is.

Source: Unger et al. 2022, Unity, whose set is about dividing operators; this one is about the operators of a layer.
"""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from runner.model.kernels.draft import Draft, has_shape_of, is_alike, value_of
from runner.model.kernels.proof import concrete, some_sizes, why_different
from runner.model.sharded.graph import arguments, operator
from runner.model.traced.operators import Program

__all__ = ["SUBSTITUTIONS", "substituted"]

_ATEN = torch.ops.aten
_DROPOUTS = {f"aten::{name}" for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")}
_MOVES = {f"aten::{name}" for name in ("transpose", "permute", "t", "swapaxes", "movedim", "numpy_T")}
_RESHAPES = {f"aten::{name}" for name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")}
_CASTS = {f"aten::{name}" for name in ("to", "float", "type_as")}
_VIEWS = _MOVES | _RESHAPES
_PRODUCTS = {"aten::matmul", "aten::bmm"}
_HIDDEN = -1e9  # a score of at most this is one that a mask hides: in 32 bits, nothing is left of another beside it
_LEAST_ADDED = (
    -1e30
)  # far below any score; kernels multiply a mask by some number, which the least of a format overflows


def substituted(program: Program, names: Sequence[str], told: Callable[[str, int, str], None]) -> Program:
    """The trace with substitutions; itself if none is made.

    Args:
        program: a trace, before it is cut; it stays what it is.
        names: some names of :data:`SUBSTITUTIONS`.
        told: is given the name of each substitution that has a place in the trace, at how many places it is made, and
            if at none, why.
    """
    for name, substitute in SUBSTITUTIONS.items():
        if name not in names:
            continue
        draft = Draft(program)
        try:
            places = substitute(draft, program)
            made = draft.finished()
            why = why_different(program, made) if places else ""
        except Exception as error:  # what a pattern does not think of may raise anything
            places, made, why = 1, program, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
        if places:
            told(name, 0 if why else places, why)
            program = program if why else made
    return program


# Operators that give what they are given


def _drop_identities(draft: Draft, _: Program) -> int:
    trained = _with_gradients(draft)
    places = 0
    for node in draft.operators():
        if node.args and _is_identity(node, trained) and is_alike(node, node.args[0]):
            draft.put(node, node.args[0])  # type: ignore[arg-type]
            places += 1
    return places


def _is_identity(node: Node, trained: set[Node]) -> bool:
    kind, given = operator(node), arguments(node)
    if kind in _DROPOUTS:
        return bool(given["p"] == 0)
    if kind == "aten::detach":
        return node.args[0] not in trained
    if kind in ("aten::mul", "aten::div"):
        return _is_number(given["other"]) and given["other"] == 1 and not given.get("rounding_mode")
    if kind in ("aten::add", "aten::sub"):
        return _is_number(given["other"]) and given["other"] == 0
    return kind == "aten::pow" and _is_number(given["exponent"]) and given["exponent"] == 1


def _with_gradients(draft: Draft) -> set[Node]:
    """The values that may have a gradient: inputs, which other layers may have made, parameters, and what is theirs."""
    found: set[Node] = set()
    for node in draft.graph.nodes:
        value = value_of(node)
        if node.op == "placeholder":
            is_buffer = node in draft.weights and value is not None and not value.requires_grad
            kept = value is not None and value.is_floating_point() and not is_buffer
        else:
            kept = operator(node) != "aten::detach" and any(each in found for each in node.all_input_nodes)
        if kept:
            found.add(node)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# Chains of views and casts that undo each other


def _cancel_reshapes(draft: Draft, program: Program) -> int:
    places, sizes = 0, list(some_sizes(program))
    for node in draft.operators():
        chain: list[Node] = []
        source: Any = node
        found: Node | None = None
        while isinstance(source, Node) and source.op == "call_function" and _only_moves(source):
            chain.insert(0, source)
            source = source.args[0]
            if is_alike(source, node) and any(_gives_itself(source, chain, each) for each in sizes):
                found = source if _is_cheaper(source, chain) else found
        if found is not None and node.users:
            draft.put(node, found)
            places += 1
    return places


def _only_moves(node: Node) -> bool:
    """Whether an operator gives the numbers that it is given, in another shape or in a format that holds them all."""
    if operator(node) in _VIEWS or operator(node) == "aten::contiguous":
        return True
    value, source = value_of(node), value_of(node.args[0])
    if operator(node) not in _CASTS or value is None or source is None:
        return False
    return value.device == source.device and value.is_floating_point() and source.is_floating_point()


def _is_cheaper(source: Node, chain: Sequence[Node]) -> bool:
    """Whether a chain does more than to put numbers in their order in memory, which a layer may want."""
    first, last = value_of(source), value_of(chain[-1])
    assert first is not None
    assert last is not None
    made: Any = source
    while isinstance(made, Node) and made.op == "call_function" and operator(made) in _VIEWS:
        made = made.args[0]
    if isinstance(made, Node) and made.op == "call_function" and operator(made) == "aten::scaled_dot_product_attention":
        return all(
            operator(node) != "aten::contiguous" for node in chain
        )  # kernels differ in the order of what they give
    in_order = list(map(str, first.stride())) == list(map(str, last.stride()))
    return in_order or sum(operator(node) != "aten::contiguous" for node in chain) > 1


def _gives_itself(source: Node, chain: Sequence[Node], sizes: Mapping[Any, int]) -> bool:
    """Whether a chain gives each number of a tensor in its place, which is tried."""
    value = value_of(source)
    assert value is not None
    kinds = [value.dtype, *(made.dtype for node in chain if (made := value_of(node)) is not None)]
    if any(torch.promote_types(value.dtype, kind) != kind for kind in kinds):
        return False  # a format on the way holds less
    shape = [concrete(size, sizes) for size in value.shape]
    numbers = torch.arange(prod(shape)).reshape(shape)
    made = numbers
    try:
        for node in chain:
            if operator(node) not in _CASTS:
                rest = torch.fx.node.map_arg(node.args[1:], lambda each: concrete(each.meta["val"], sizes))
                made = node.target(made, *rest, **node.kwargs)  # type: ignore[operator]
    except Exception:  # these sizes are not the ones that the layer takes
        return False
    return torch.equal(made, numbers)


# Rows of a table by their numbers


def _one_hot(draft: Draft, _: Program) -> int:
    places = 0
    for node in draft.operators():
        if operator(node) not in ("aten::linear", "aten::matmul", "aten::mm") or not isinstance(node.args[1], Node):
            continue
        source, table = _behind_casts(node.args[0]), node.args[1]
        weight = value_of(table)
        if operator(source) != "aten::one_hot" or weight is None or weight.dim() != 2:
            continue
        if operator(node) == "aten::linear":
            table = draft.add(node, _ATEN.t.default, table)
        made = draft.add(node, _ATEN.embedding.default, table, source.args[0])
        bias = arguments(node).get("bias")
        if bias is not None:
            made = draft.add(node, _ATEN.add.Tensor, made, bias)
        if is_alike(made, node):
            draft.put(node, made)
            places += 1
    return places


def _behind_casts(node: Any) -> Node:
    while isinstance(node, Node) and node.op == "call_function" and operator(node) in _CASTS:
        node = node.args[0]
    return node  # type: ignore[no-any-return]


# Attention that is written out


_FILLS: Mapping[Any, tuple[int, int]] = {
    _ATEN.masked_fill.Scalar: (0, 2),
    _ATEN.where.ScalarOther: (1, 2),
    _ATEN.where.ScalarSelf: (2, 1),
}
"""Operators that put a number in the place of scores, with the positions of the scores and of the number."""


@dataclass(frozen=True)
class _Scores:
    """What a softmax is taken of.

    Args:
        query, key: what is multiplied; the key is turned already, [..., features, tokens].
        scale: a number by which the product is multiplied.
        masks: operators behind it that hide scores or add to them, each with the position of the scores in it.
    """

    query: Node
    key: Node
    scale: float
    masks: tuple[tuple[Node, int], ...] = ()


def _attention(draft: Draft, _: Program) -> int:
    places, fixed = 0, draft.weights | draft.constants
    for node in draft.operators():
        if operator(node) not in _PRODUCTS:
            continue
        softmax = _softmax_in(node.args[0])
        scores = None if softmax is None else _scores_in(softmax.args[0])
        if scores is not None and _are_of_one_form(scores, node.args[1]) and _can_be_added(scores, fixed):
            made = _attended(draft, node, scores)
            if is_alike(made, node):
                draft.put(node, made)
                places += 1
    return places


def _softmax_in(node: Any) -> Node | None:
    """A softmax over the last axis that nothing else reads, behind casts and dropout that drops nothing."""
    while _is_inner(node) and (operator(node) in _CASTS or (operator(node) in _DROPOUTS and arguments(node)["p"] == 0)):
        node = node.args[0]
    if not _is_inner(node) or operator(node) != "aten::softmax":
        return None
    value = value_of(node)
    return node if value is not None and arguments(node)["dim"] in (-1, value.dim() - 1) else None


def _is_inner(node: Any) -> bool:
    """Whether a node is an operator whose value one other operator reads, and that gives one tensor."""
    is_call = isinstance(node, Node) and node.op == "call_function" and len(node.users) == 1
    return is_call and isinstance(node.target, torch._ops.OpOverload) and value_of(node) is not None


def _scores_in(node: Any) -> _Scores | None:
    if not _is_inner(node):
        return None
    kind, given = operator(node), arguments(node)
    if kind in _PRODUCTS:
        return _Scores(node.args[0], node.args[1], 1.0)
    if kind in _CASTS:
        return _scores_in(node.args[0])
    factor = _factor(node)
    if factor is not None:
        inner = _scores_in(node.args[0])
        return None if inner is None or inner.masks else _Scores(inner.query, inner.key, factor * inner.scale)
    at = None
    if node.target in _FILLS:
        at = _FILLS[node.target][0]
    elif node.target is _ATEN.add.Tensor and given["alpha"] == 1 and isinstance(node.args[1], Node):
        at = 0 if _scores_in(node.args[0]) is not None else 1
    inner = None if at is None else _scores_in(node.args[at])
    if inner is None or at is None or not has_shape_of(node, node.args[at]):
        return None
    return _Scores(inner.query, inner.key, inner.scale, (*inner.masks, (node, at)))


def _factor(node: Any) -> float | None:
    """The number by which an operator multiplies its first argument; None if it does something else."""
    if operator(node) not in ("aten::mul", "aten::div"):
        return None
    given = arguments(node)
    other = given["other"]
    value = value_of(node)
    if not _is_number(other) or given.get("rounding_mode") or value is None or not value.is_floating_point():
        return None
    if not is_alike(node, node.args[0]):
        return None
    if operator(node) == "aten::div":
        return 1 / other if other else None
    return float(other)


def _are_of_one_form(scores: _Scores, value: Any) -> bool:
    """Whether query, key and value have the same samples and heads, in one format, as one operator wants them."""
    tensors = [value_of(each) for each in (scores.query, scores.key, value)]
    if any(each is None or each.dim() not in (3, 4) for each in tensors):
        return False
    forms = {(str(list(map(str, each.shape[:-2]))), each.dtype) for each in tensors if each is not None}
    return len(forms) == 1


def _can_be_added(scores: _Scores, weights: set[Node]) -> bool:
    """Whether to add the numbers of masks to scores hides what it hides to put them in the place of scores.

    Numbers must be -inf, or so low that nothing is left of a score beside them. Where all scores of a row are hidden by
    other numbers than -inf, a sum still hands gradients to them; the trial finds that, but for what an input adds.
    """
    numbers: list[float] = []
    added: list[Any] = []
    for mask, at in scores.masks:
        args: Any = mask.args
        if mask.target in _FILLS:
            numbers.append(args[_FILLS[mask.target][1]])
            if numbers[-1] > max(_HIDDEN, torch.finfo(args[at].meta["val"].dtype).min):
                return False
        else:
            added.append(args[1 - at])
    return all(each == float("-inf") for each in numbers) or not any(_is_of_inputs(each, weights) for each in added)


def _is_of_inputs(value: Any, weights: set[Node]) -> bool:
    """Whether a tensor is made of the numbers of a layer's inputs, and not of their sizes alone."""
    waiting, seen = [value], set[Node]()
    while waiting:
        node = waiting.pop()
        if value_of(node) is None or node in seen or node in weights:
            continue
        if node.op == "placeholder":
            return True
        seen.add(node)
        waiting += node.all_input_nodes
    return False


def _attended(draft: Draft, node: Node, scores: _Scores) -> Node:
    """Attention as one operator, in front of a node."""
    add = draft.add
    tensors = [scores.query, add(node, _ATEN.transpose.int, scores.key, -2, -1), node.args[1]]
    query = tensors[0]
    flat = query.meta["val"].dim() == 3  # type: ignore[union-attr]  # without an axis of heads, which operators want
    if flat:
        tensors = [add(node, _ATEN.unsqueeze.default, each, 1) for each in tensors]
    mask = _mask(draft, node, scores, axis=1 if flat else 0)
    options: dict[str, Any] = {"scale": scores.scale} | ({} if mask is None else {"attn_mask": mask})
    made = add(node, _ATEN.scaled_dot_product_attention.default, *tensors, **options)
    if flat:
        made = add(node, _ATEN.squeeze.dim, made, 1)
    # a product lies in its order in memory, while each kernel of attention has an order of its own
    return made if all(_puts_in_order(each) for each in node.users) else add(node, _ATEN.contiguous.default, made)


def _puts_in_order(reader: Node) -> bool:
    """Whether an operator takes a value in any order in memory, and so do all that read what it only turns."""
    if operator(reader) in ("aten::contiguous", "aten::reshape"):
        return True
    return operator(reader) in _MOVES and bool(reader.users) and all(_puts_in_order(each) for each in reader.users)


def _mask(draft: Draft, node: Node, scores: _Scores, axis: int) -> Node | None:
    """What the masks do to scores of zero, which is what is added to scores; None without masks.

    Args:
        draft, node, scores: the mask of these scores is made in front of the node.
        axis: where a mask of three axes gets one more.
    """
    if not scores.masks:
        return None
    kind = scores.query.meta["val"].dtype
    first, place = scores.masks[0]
    scored = first.args[place].meta["val"].dtype  # type: ignore[union-attr]
    made = draft.add(node, _ATEN.new_zeros.default, scores.query, [1, 1], dtype=scored)
    for mask, at in scores.masks:
        args: list[Any] = list(mask.args)
        args[at] = made
        if mask.target in _FILLS:
            number = _FILLS[mask.target][1]
            low = max(args[number], _LEAST_ADDED)
            is_hidden = args[number] == float("-inf") or low < torch.finfo(kind).min  # 16 bits hold no such number
            args[number] = float("-inf") if is_hidden else low
        made = draft.add(node, mask.target, *args, **mask.kwargs)
    if made.meta["val"].dtype != kind:
        made = draft.add(node, _ATEN.to.dtype, made, kind)
    return draft.add(node, _ATEN.unsqueeze.default, made, axis) if made.meta["val"].dim() == 3 else made


# Numbers by which values are multiplied


def _fold_scales(draft: Draft, _: Program) -> int:
    places = 0
    for node in draft.operators():
        kind = operator(node)
        if kind == "aten::scaled_dot_product_attention":
            places += _into_attention(draft, node)
        elif _factor(node) is not None and node.users:
            places += _into_another(draft, node)
    return places


def _into_attention(draft: Draft, node: Node) -> int:
    given = arguments(node)
    features = given["query"].meta["val"].shape[-1]
    if not isinstance(features, int):
        return 0
    places, scale = 0, features**-0.5 if given["scale"] is None else given["scale"]
    for at in (0, 1):
        while (found := _scaled(node.args[at])) is not None:
            scale, places = scale * _number(found), places + 1
            draft.put(found, found.args[0])  # type: ignore[arg-type]
    if places:
        node.kwargs = {**node.kwargs, "scale": scale}
    return places


def _number(node: Node) -> float:
    factor = _factor(node)
    assert factor is not None
    return factor


def _scaled(node: Any) -> Node | None:
    """What multiplies a value by a number, if only views are behind it and nothing else reads it; None if nothing."""
    while _is_inner(node) and operator(node) in _VIEWS:
        node = node.args[0]
    return node if _is_inner(node) and _factor(node) is not None else None


def _into_another(draft: Draft, node: Node) -> int:
    """Fold a number into the one before it, or that of a product of two values into the smaller one of them."""
    factor, source = _number(node), node.args[0]
    if (earlier := _scaled(source)) is not None:
        _multiply(earlier, factor)
        draft.put(node, source)  # type: ignore[arg-type]
        return 1
    if not _is_inner(source) or operator(source) not in _PRODUCTS:  # type: ignore[arg-type]
        return 0
    assert isinstance(source, Node)
    least = min((0, 1), key=lambda at: _elements(source.args[at]))
    operand = source.args[least]
    if _elements(operand) >= _elements(source):
        return 0
    if (earlier := _scaled(operand)) is not None:
        _multiply(earlier, factor)
    else:
        smaller = draft.add(source, _ATEN.mul.Tensor, operand, factor)
        source.args = tuple(smaller if at == least else each for at, each in enumerate(source.args))
    draft.put(node, source)
    return 1


def _multiply(node: Node, factor: float) -> None:
    """Let what multiplies by a number multiply by another one, too."""
    own = _number(node)
    node.target, node.args, node.kwargs = _ATEN.mul.Tensor, (node.args[0], own * factor), {}


def _elements(node: Any) -> int:
    value = value_of(node)
    assert value is not None
    sizes: list[Any] = list(value.shape)
    known: list[Any] = [size.node.hint if isinstance(size, torch.SymInt) else size for size in sizes]
    return prod(map(int, known))


# Linear maps of one value


def _merge_linears(draft: Draft, _: Program) -> int:
    groups: dict[Any, list[Node]] = {}
    for node in draft.operators():
        if operator(node) == "aten::linear":
            given = arguments(node)
            weights = [each for each in (given["weight"], given["bias"]) if each is not None]
            if all(each in draft.weights for each in weights):
                kinds = tuple((each.meta["val"].dtype, each.meta["val"].requires_grad) for each in weights)
                groups.setdefault((given["input"], kinds), []).append(node)  # a frozen weight gets no gradient
    merged = [group for group in groups.values() if len(group) > 1 and len({node.args[1] for node in group}) > 1]
    for group in merged:
        _merge(draft, group)
    return len(merged)


def _merge(draft: Draft, group: Sequence[Node]) -> None:
    """One map in front of the first of a group, whose features are then handed out."""
    first, given = group[0], [arguments(node) for node in group]
    weight = draft.add(first, _ATEN.cat.default, [each["weight"] for each in given])
    bias = None if given[0]["bias"] is None else draft.add(first, _ATEN.cat.default, [each["bias"] for each in given])
    whole = draft.add(first, _ATEN.linear.default, given[0]["input"], weight, bias)
    sizes = [each["weight"].meta["val"].shape[0] for each in given]
    parts = draft.add(first, _ATEN.split_with_sizes.default, whole, sizes, -1)
    for at, node in enumerate(group):
        draft.put(node, draft.add(first, python.getitem, parts, at))


SUBSTITUTIONS: Mapping[str, Callable[[Draft, Program], int]] = {
    "drop_identities": _drop_identities,
    "one_hot": _one_hot,
    "attention": _attention,
    "cancel_reshapes": _cancel_reshapes,
    "fold_scales": _fold_scales,
    "merge_linears": _merge_linears,
}
"""Each changes a draft of a trace and says at how many places, in the order in which they are made."""
