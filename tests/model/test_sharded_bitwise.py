"""Ranks that share each layer's weights train a decoder as plain PyTorch does: by partial products, to the bit."""

from __future__ import annotations

import pytest
import sharded_reference as reference
import torch
from shard_threads import RankOrder, run_shards
from sharded_reference import BLOCKS, SHAPES, SIZE, WIDTH, Weights
from torch import Tensor
from torch.nn import functional

from runner.model.sharded.group import ShardGroup
from runner.model.sharded.operators import enter, gather_parts, leave, scatter_sum
from runner.model.sharded.values import Shard
from runner.model.sharded.vocabulary import vocabulary_cross_entropy, vocabulary_embedding
from runner.model.split.backward import backward_input, backward_weight

STEPS, SAMPLES, TOKENS = 3, 2, 8
OF_SEQUENCES = ("norm", "norm_bias", "feed_norm", "out_bias", "down_bias", "last_norm", "gate_a", "down_b")
KINDS = pytest.mark.parametrize(
    ("tied", "adapted"), [(False, False), (True, False), (False, True)], ids=["head", "tied", "adapters"]
)
Step = tuple[Tensor, Weights, Weights]  # loss, gradients, weights after the step


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids, target = torch.randint(0, SIZE, (2, SAMPLES, TOKENS), generator=generator)
    target[0, 3], target[1, 0], ids[0, 0] = -100, SIZE - 1, SIZE - 1
    return ids, target


def own_parts(whole: Weights, group: ShardGroup) -> Weights:
    return {
        name: reference.cut(name, value.detach(), group.degree)[group.index].requires_grad_()
        for name, value in whole.items()
    }


def is_partial(name: str, sequence: bool) -> bool:
    """Whether each rank has a part of the gradient of a weight that all have."""
    kind = name.split(".")[-1]
    return kind == "head_norm" or (sequence and kind in OF_SEQUENCES)


def rank_loss(weights: Weights, ids: Tensor, target: Tensor, group: str, sequence: bool, mutant: str = "") -> Tensor:
    """One rank's forward of the reference's decoder, by the operators."""

    def entry(value: Tensor, lacking: str = "no entry") -> Tensor:
        if mutant == lacking:
            return value
        return gather_parts(value, 1, group) if sequence else enter(value, group)

    def leaving(value: Tensor) -> Tensor:
        return scatter_sum(value, 1, group) if sequence else leave(value, group)

    def row(value: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = functional.linear(value, weight, bias if mutant == "bias before the sum" else None)
        left = leaving(product)
        return left if mutant == "bias before the sum" else left + bias

    table = weights["tokens"]
    x = vocabulary_embedding(
        ids, table, lambda own: functional.embedding(own, table), group, SIZE, scatter_dim=1 if sequence else None
    )
    for block in range(BLOCKS):
        own = {name: weights[f"{block}.{name}"] for name in SHAPES}
        y = functional.layer_norm(x, (WIDTH,), own["norm"], own["norm_bias"])
        y = entry(y)
        query = functional.linear(y, own["query"], own["query_bias"])
        key, value = functional.linear(y, own["key"]), functional.linear(y, own["value"])
        mixed = reference.attention(query, key, value, own["head_norm"])
        x = x + row(mixed, own["out"], own["out_bias"])
        fed = functional.rms_norm(x, (WIDTH,), own["feed_norm"], 1e-6)
        y = entry(fed)
        gate, up = functional.linear(y, own["gate"]), functional.linear(y, own["up"], own["up_bias"])
        beside = {name: weights[f"{block}.{name}"] for name in reference.ADAPTERS if f"{block}.{name}" in weights}
        if beside:
            thin = entry(functional.linear(fed, beside["gate_a"]), "no entry of adapters")
            gate = gate + functional.linear(thin, beside["gate_b"])
        hidden = functional.silu(gate) * up
        left = row(hidden, own["down"], own["down_bias"])
        if beside:
            left = left + functional.linear(leaving(functional.linear(hidden, beside["down_a"])), beside["down_b"])
        x = x + left
    y = entry(functional.rms_norm(x, (WIDTH,), weights["last_norm"], 1e-6))
    size = SIZE + 1 if mutant == "padded logits count" else SIZE
    total, count = vocabulary_cross_entropy(functional.linear(y, weights.get("head", table)), target, group, size)
    return (enter(total, group) if mutant == "a loss of each rank" else total) / count


def trained_ranks(whole: Weights, degree: int, sequence: bool) -> list[list[Step]]:
    """What each rank has after each step."""

    def rank(group: ShardGroup, exchange: RankOrder) -> list[Step]:
        own = own_parts(whole, group)
        optimizer, steps = torch.optim.AdamW(own.values(), lr=0.05), []
        for _ in range(STEPS):
            loss = rank_loss(own, *batch(), group.name, sequence)
            for value, gradient in zip(own.values(), torch.autograd.grad(loss, list(own.values())), strict=True):
                value.grad = gradient
            for name, value in own.items():
                if is_partial(name, sequence) and value.grad is not None:
                    value.grad = exchange.all_reduce(value.grad)
            gradients = {name: value.grad for name, value in own.items() if value.grad is not None}
            optimizer.step()
            steps.append((loss.detach(), gradients, {name: value.detach().clone() for name, value in own.items()}))
        return steps

    return run_shards(degree, rank)


def trained_reference(whole: Weights, degree: int, sequence: bool) -> list[list[Step]]:
    """The same of the reference's ranks, in one process."""
    parts: list[Weights] = [{} for _ in range(degree)]
    for name, value in whole.items():
        cuts = [part.requires_grad_() for part in reference.cut(name, value, degree)]
        for rank, part in enumerate(parts):
            part[name] = cuts[0 if reference.divided_dim(name) is None else rank]
    leaves = list({id(value): value for part in parts for value in part.values()}.values())
    optimizer, steps = torch.optim.AdamW(leaves, lr=0.05), list[list[Step]]()
    for _ in range(STEPS):
        loss = reference.sharded_loss(parts, *batch(), sequence)
        for value, gradient in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            value.grad = gradient
        gradients = [{name: value.grad for name, value in part.items() if value.grad is not None} for part in parts]
        optimizer.step()
        weights = [{name: value.detach().clone() for name, value in part.items()} for part in parts]
        steps.append([(loss.detach(), *each) for each in zip(gradients, weights, strict=True)])
    return [list(each) for each in zip(*steps, strict=True)]


@KINDS
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("degree", [2, 4])
def test_losses_gradients_and_weights_are_the_references_bit_for_bit(
    degree: int, dtype: torch.dtype, sequence: bool, tied: bool, adapted: bool
) -> None:
    whole = reference.make_weights(tied, dtype, adapted)
    found, expected = trained_ranks(whole, degree, sequence), trained_reference(whole, degree, sequence)
    for rank, other in zip(found, expected, strict=True):
        for (loss, gradients, weights), (other_loss, other_gradients, other_weights) in zip(rank, other, strict=True):
            assert torch.equal(loss, other_loss)
            assert {name for name in whole if not torch.equal(gradients[name], other_gradients[name])} == set()
            assert {name for name in whole if not torch.equal(weights[name], other_weights[name])} == set()
    assert not torch.equal(found[0][-1][0], found[0][0][0])


def error(degree: int, dtype: torch.dtype, sequence: bool, tied: bool, adapted: bool, mutant: str = "") -> float:
    """The largest difference from the whole model: of the loss, in parts of it, or of a gradient, of the largest."""
    whole = {name: value.requires_grad_() for name, value in reference.make_weights(tied, dtype, adapted).items()}
    loss = reference.whole_loss(whole, *batch())
    expected = dict(zip(whole, torch.autograd.grad(loss, list(whole.values())), strict=True))

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Weights]:
        own = own_parts(whole, group)
        loss = rank_loss(own, *batch(), group.name, sequence, mutant)
        gradients = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
        for name in own:
            if is_partial(name, sequence) and name.split(".")[-1] != mutant:
                gradients[name] = exchange.all_reduce(gradients[name])
        return loss.detach(), gradients

    ranks = run_shards(degree, rank)
    of_loss = max(float(((own - loss) / loss).detach().abs()) for own, _ in ranks)
    differences = []
    for name, gradient in expected.items():
        dim = reference.divided_dim(name)
        if dim is None:
            differences += [float((own[name] - gradient).abs().max()) for _, own in ranks]
        else:
            joined = torch.cat([own[name] for _, own in ranks], dim).narrow(dim, 0, gradient.shape[dim])
            differences.append(float((joined - gradient).abs().max()))
    return max(of_loss, max(differences) / max(float(gradient.abs().max()) for gradient in expected.values()))


@KINDS
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("degree", [2, 4])
def test_the_whole_model_gives_the_same_to_rounding(degree: int, sequence: bool, tied: bool, adapted: bool) -> None:
    assert error(degree, torch.float64, sequence, tied, adapted) < 1e-13
    assert error(degree, torch.float32, sequence, tied, adapted) < 2e-6


@pytest.mark.parametrize(
    ("mutant", "sequence"),
    [
        *(("no entry", False), ("bias before the sum", False), ("bias before the sum", True)),
        *(("head_norm", False), ("head_norm", True), ("feed_norm", True), ("out_bias", True)),
        *(("padded logits count", False), ("a loss of each rank", False), ("a loss of each rank", True)),
        *(("no entry of adapters", False), ("gate_a", True), ("down_b", True)),
    ],
)
def test_mutants_are_told(mutant: str, sequence: bool) -> None:
    """The name of a weight: the parts of its gradient are not summed."""
    assert error(2, torch.float64, sequence, True, True, mutant) > 1e-3


@pytest.mark.parametrize("degree", [2, 4])
def test_parts_are_cut_and_joined_as_described(degree: int) -> None:
    for name, value in reference.make_weights(False, torch.float32).items():
        if (dim := reference.divided_dim(name)) is not None:
            padding = -value.shape[dim] % degree
            shards = [Shard(dim, index, degree, tuple(value.shape), padding=padding) for index in range(degree)]
            parts = [shard.cut(value) for shard in shards]
            assert all(map(torch.equal, parts, reference.cut(name, value, degree)))
            assert [part.shape for part in parts] == [shard.shape for shard in shards]
            assert torch.equal(shards[-1].join(parts), value)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_decoder_exchanges_what_its_blocks_demand(degree: int, sequence: bool) -> None:
    """2 L + 1 sums in each pass and three numbers per token; with divided sequences twice as many of half the bytes."""
    whole = reference.make_weights(False, torch.float32)
    tokens, activation = SAMPLES * TOKENS, SAMPLES * TOKENS * WIDTH
    small = [("all_reduce_max", tokens), ("all_reduce", tokens), ("all_reduce", tokens)]

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        own = own_parts(whole, group)
        loss = rank_loss(own, *batch(), group.name, sequence)
        forward = list(exchange.calls)
        torch.autograd.grad(loss, list(own.values()))
        return forward, exchange.calls[len(forward) :]

    gathered, scattered = ("all_gather", activation // degree), ("reduce_scatter", activation)
    pair, exits = (
        ([scattered, gathered], 2 * BLOCKS + 1) if sequence else ([("all_reduce", activation)], 2 * BLOCKS + 1)
    )
    for forward, backward in run_shards(degree, rank):
        assert forward == pair * exits + small
        assert backward == pair * exits


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_of_a_backward_in_two_parts_every_matrix_waits_and_nothing_is_exchanged(sequence: bool, tied: bool) -> None:
    whole = reference.make_weights(tied, torch.float32)

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[set[str], int]:
        own = own_parts(whole, group)
        expected = torch.autograd.grad(rank_loss(own, *batch(), group.name, sequence), list(own.values()))
        _, pending = backward_input([rank_loss(own, *batch(), group.name, sequence)], None, [])
        waiting, before = {name for name, value in own.items() if value.grad is None}, len(exchange.calls)
        backward_weight(pending)
        for value, gradient in zip(own.values(), expected, strict=True):
            assert value.grad is not None
            assert torch.equal(value.grad, gradient)
        return waiting, len(exchange.calls) - before

    matrices = {name for name, value in whole.items() if value.dim() == 2}
    assert run_shards(2, rank) == [(matrices, 0)] * 2
