"""A small decoder in plain PyTorch: as one whole, and by the partial products of t ranks, summed in their order.

The second is what t ranks compute, to the bit, if they sum in the order of the ranks: each product has the shapes of a
rank's part, each value that all ranks have is read by t copies, whose gradients are summed rank by rank. With
``sequence`` the residual is a list of t contiguous parts of the tokens, because a norm of a part of a larger tensor,
or a division between residual and norm, has other last bits.

Both have all that a decoder may: grouped queries, a norm per head, biases of columns and rows, a gated MLP, norms with
and without bias, a vocabulary that t does not divide, and, without ``head``, one table for embedding and logits. With
``gate_a`` there are two thin matrices beside the gate, whose features ranks divide, and beside the row behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

WIDTH, HEADS, KEY_HEADS, HEAD, INNER, BLOCKS, SIZE = 16, 8, 4, 4, 24, 2, 131
THIN = 3
Weights = dict[str, Tensor]
SHAPES = {
    **{"norm": (WIDTH,), "norm_bias": (WIDTH,), "feed_norm": (WIDTH,), "head_norm": (HEAD,)},
    **{"query": (HEADS * HEAD, WIDTH), "query_bias": (HEADS * HEAD,)},
    **{"key": (KEY_HEADS * HEAD, WIDTH), "value": (KEY_HEADS * HEAD, WIDTH)},
    **{"out": (WIDTH, HEADS * HEAD), "out_bias": (WIDTH,)},
    **{"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "up_bias": (INNER,)},
    **{"down": (WIDTH, INNER), "down_bias": (WIDTH,)},
}
ADAPTERS = {"gate_a": (THIN, WIDTH), "gate_b": (INNER, THIN), "down_a": (THIN, INNER), "down_b": (WIDTH, THIN)}
DIVIDED = dict.fromkeys(("tokens", "head", "query", "query_bias", "key", "value", "gate", "up", "up_bias", "gate_b"), 0)
DIVIDED |= dict.fromkeys(("out", "down", "down_a"), 1)


def make_weights(tied: bool, dtype: torch.dtype, adapted: bool = False) -> Weights:
    """The whole weights, by names such as ``0.query``; norms' lie around 1."""
    of_block = SHAPES | (ADAPTERS if adapted else {})
    blocks = {f"{block}.{name}": shape for block in range(BLOCKS) for name, shape in of_block.items()}
    shapes = {"tokens": (SIZE, WIDTH), **blocks, "last_norm": (WIDTH,)} | ({} if tied else {"head": (SIZE, WIDTH)})
    generator = torch.Generator().manual_seed(1)
    drawn = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: (value + name.endswith("norm")).to(dtype) for name, value in drawn.items()}


def divided_dim(name: str) -> int | None:
    """The dimension along which ranks divide a weight; None for norms and rows' biases, which all have."""
    return DIVIDED.get(name.split(".")[-1])


def cut(name: str, whole: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's part of a weight; a table of the vocabulary is padded with rows of zeros."""
    dim = divided_dim(name)
    if dim is None:
        return [whole.clone() for _ in range(ranks)]
    if len(whole) == SIZE:
        whole = torch.cat([whole, whole.new_zeros(-SIZE % ranks, WIDTH)])
    return [part.clone() for part in whole.chunk(ranks, dim)]


def attention(query: Tensor, key: Tensor, value: Tensor, norm: Tensor) -> Tensor:
    """Causal attention of as many heads as there are."""
    query, key, value = (each.view(*each.shape[:2], -1, HEAD).transpose(1, 2) for each in (query, key, value))
    query = functional.rms_norm(query, (HEAD,), norm, 1e-6)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2)


def whole_loss(weights: Weights, ids: Tensor, target: Tensor) -> Tensor:
    """The mean over the targets that count of ordinary layers' loss."""
    x = functional.embedding(ids, weights["tokens"])
    for block in range(BLOCKS):
        own = {name: weights[f"{block}.{name}"] for name in SHAPES}
        y = functional.layer_norm(x, (WIDTH,), own["norm"], own["norm_bias"])
        query = functional.linear(y, own["query"], own["query_bias"])
        key, value = functional.linear(y, own["key"]), functional.linear(y, own["value"])
        x = x + functional.linear(attention(query, key, value, own["head_norm"]), own["out"], own["out_bias"])
        y = functional.rms_norm(x, (WIDTH,), own["feed_norm"], 1e-6)
        gate, up = functional.linear(y, own["gate"]), functional.linear(y, own["up"], own["up_bias"])
        beside = {name: weights[f"{block}.{name}"] for name in ADAPTERS if f"{block}.{name}" in weights}
        if beside:
            gate = gate + functional.linear(functional.linear(y, beside["gate_a"]), beside["gate_b"])
        hidden = functional.silu(gate) * up
        left = functional.linear(hidden, own["down"], own["down_bias"])
        if beside:
            left = left + functional.linear(functional.linear(hidden, beside["down_a"]), beside["down_b"])
        x = x + left
    x = functional.rms_norm(x, (WIDTH,), weights["last_norm"], 1e-6)
    logits = functional.linear(x, weights.get("head", weights["tokens"]))
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


class Copies(torch.autograd.Function):
    """One value, or its parts along the tokens, read as a whole by t ranks; their gradients are summed in order."""

    @staticmethod
    def forward(ctx: Any, ranks: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.parts = len(parts)
        return tuple(torch.cat(parts, 1) if len(parts) > 1 else parts[0].clone() for _ in range(ranks))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = in_order([gradient.contiguous() for gradient in gradients])
        return None, *(part.contiguous() for part in (whole.chunk(ctx.parts, 1) if ctx.parts > 1 else [whole]))


class Sum(torch.autograd.Function):
    """The ranks' parts of a sum, in order: one value, or its parts along the tokens."""

    @staticmethod
    def forward(ctx: Any, parts: int, *summands: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = len(summands)
        whole = in_order(summands)
        return tuple(part.contiguous() for part in whole.chunk(parts, 1)) if parts > 1 else (whole,)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        whole = torch.cat(gradients, 1) if len(gradients) > 1 else gradients[0]
        return None, *([whole] * ctx.ranks)


def copied(ranks: int, *parts: Tensor) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = Copies.apply(ranks, *parts)  # type: ignore[no-untyped-call, unused-ignore]
    return made


def summed(parts: int, summands: Iterable[Tensor]) -> tuple[Tensor, ...]:
    made: tuple[Tensor, ...] = Sum.apply(parts, *summands)  # type: ignore[no-untyped-call, unused-ignore]
    return made


def sharded_loss(parts: list[Weights], ids: Tensor, target: Tensor, sequence: bool) -> Tensor:
    """The same by t ranks' parts of the weights; what all of them hold is taken from the first.

    Returns: the mean loss, whose gradients are those of the parts, summed over the ranks where all hold the whole.
    """
    ranks = len(parts)
    streams = ranks if sequence else 1

    def linear(inputs: Sequence[Tensor], name: str, bias: str = "") -> list[Tensor]:
        return [
            functional.linear(each, own[name], own[bias] if bias else None)
            for each, own in zip(inputs, parts, strict=True)
        ]

    def copies(name: str, number: int) -> Sequence[Tensor]:
        return [parts[0][name]] if number == 1 else copied(number, parts[0][name])

    def leave(summands: Sequence[Tensor], bias: str) -> list[Tensor]:
        left = summed(streams, summands)
        return [each + own for each, own in zip(left, copies(bias, streams), strict=True)]

    def norm(x: Sequence[Tensor], name: str, bias: str = "") -> list[Tensor]:
        weights = copies(name, streams)
        if not bias:
            return [functional.rms_norm(each, (WIDTH,), own, 1e-6) for each, own in zip(x, weights, strict=True)]
        shifts = copies(bias, streams)
        return [
            functional.layer_norm(each, (WIDTH,), *own)
            for each, own in zip(x, zip(weights, shifts, strict=True), strict=True)
        ]

    def thin(value: Sequence[Tensor], name: str) -> list[Tensor]:
        return [functional.linear(each, own) for each, own in zip(value, copies(name, streams), strict=True)]

    def added(values: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
        return [each + other for each, other in zip(values, others, strict=True)]

    x = list(summed(streams, (looked_up(ids, own["tokens"], rank) for rank, own in enumerate(parts))))
    for block in map(str, range(BLOCKS)):
        y = copied(ranks, *norm(x, f"{block}.norm", f"{block}.norm_bias"))
        query = linear(y, f"{block}.query", f"{block}.query_bias")
        key, value = linear(y, f"{block}.key"), linear(y, f"{block}.value")
        mixed = map(attention, query, key, value, copies(f"{block}.head_norm", ranks))
        left = leave(linear(list(mixed), f"{block}.out"), f"{block}.out_bias")
        x = added(x, left)
        fed = norm(x, f"{block}.feed_norm")
        y = copied(ranks, *fed)
        gate, up = linear(y, f"{block}.gate"), linear(y, f"{block}.up", f"{block}.up_bias")
        adapted = f"{block}.gate_a" in parts[0]
        if adapted:
            gate = added(gate, linear(copied(ranks, *thin(fed, f"{block}.gate_a")), f"{block}.gate_b"))
        hidden = [functional.silu(first) * second for first, second in zip(gate, up, strict=True)]
        left = leave(linear(hidden, f"{block}.down"), f"{block}.down_bias")
        if adapted:
            left = added(left, thin(summed(streams, linear(hidden, f"{block}.down_a")), f"{block}.down_b"))
        x = added(x, left)
    y = copied(ranks, *norm(x, "last_norm"))
    logits = linear(y, "head" if "head" in parts[0] else "tokens")
    return cross_entropy([each.flatten(0, 1) for each in logits], target.flatten())


def looked_up(ids: Tensor, rows: Tensor, rank: int) -> Tensor:
    """The vectors of the ids that a rank has, and zeros for the others."""
    own = ids - rank * len(rows)
    foreign = (own < 0) | (own >= len(rows))
    return functional.embedding(own.masked_fill(foreign, 0), rows).masked_fill(foreign.unsqueeze(-1), 0)


def cross_entropy(logits: list[Tensor], target: Tensor) -> Tensor:
    """log Σ exp(z) - z[target], z less the largest; of padding, z is -inf."""
    columns = logits[0].shape[1]
    beyond = [torch.arange(rank * columns, (rank + 1) * columns) >= SIZE for rank in range(len(logits))]
    masked = [each.masked_fill(mask, -torch.inf) for each, mask in zip(logits, beyond, strict=True)]
    top = torch.cat(masked, 1).detach().amax(1)
    shifted = [each - top.unsqueeze(1) for each in masked]
    chosen = []
    for rank, each in enumerate(shifted):
        own = target - rank * columns
        foreign = (own < 0) | (own >= columns)
        picked = each.gather(1, own.masked_fill(foreign, 0).unsqueeze(1)).squeeze(1)
        chosen.append(picked.masked_fill(foreign, 0))
    losses = in_order([each.exp().sum(1) for each in shifted]).log() - in_order(chosen)
    counts = target != -100
    return losses.masked_fill(~counts, 0).sum() / counts.sum()
