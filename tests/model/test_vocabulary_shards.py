"""A vocabulary that ranks divide gives what torch's cross-entropy and embedding give of the whole."""

from __future__ import annotations

import pytest
import torch
from shard_threads import RankOrder, run_shards
from torch import Tensor, nn
from torch.nn import functional

from runner.model.sharded.group import ShardGroup
from runner.model.sharded.vocabulary import (
    own_padding_index,
    vocabulary_cross_entropy,
    vocabulary_embedding,
    whole_logits,
)

CASES = [(131, 2), (131, 4), (130, 2), (5, 4)]  # of the last, one rank has one id and padding, another padding alone


def cut(whole: Tensor, degree: int, dim: int, padding: float) -> list[Tensor]:
    """Parts of equal size; what they have beyond the whole is ``padding``."""
    rows = -(-whole.shape[dim] // degree)
    shape = list(whole.shape)
    shape[dim] = rows * degree - whole.shape[dim]
    return [part.contiguous() for part in torch.cat([whole, whole.new_full(shape, padding)], dim).chunk(degree, dim)]


def divided_loss(
    logits: Tensor, target: Tensor, degree: int, ignore_index: int = -100, scale: float = 1.0
) -> list[tuple[Tensor, Tensor, Tensor, list[tuple[str, int]], int]]:
    """Of each rank: loss, weight, gradient of its part, exchanges, and how many of them the forward made."""
    parts = cut(logits, degree, -1, padding=1e4)

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Tensor, Tensor, list[tuple[str, int]], int]:
        part = parts[group.index].clone().requires_grad_()
        loss, weight = vocabulary_cross_entropy(part, target, group.name, logits.shape[-1], ignore_index)
        forward = len(exchange.calls)
        (gradient,) = torch.autograd.grad(loss * scale, part)
        return loss.detach(), weight, gradient, exchange.calls, forward

    return run_shards(degree, rank)


def whole_loss(logits: Tensor, target: Tensor, ignore_index: int = -100, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = functional.cross_entropy(
        leaf.flatten(0, -2).float() if leaf.dtype == torch.bfloat16 else leaf.flatten(0, -2),
        target.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return loss.detach(), torch.autograd.grad(loss * scale, leaf)[0]


def samples(size: int, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    logits = 4 * torch.randn(*shape, size, dtype=torch.float64, generator=generator)
    target = torch.randint(0, size, shape, generator=generator)
    target.view(-1)[:2] = torch.tensor([size - 1, -100])
    return logits.to(dtype), target


@pytest.mark.parametrize("shape", [(3, 5), (7,)], ids=["tokens", "rows"])
@pytest.mark.parametrize(("size", "degree"), CASES)
def test_the_loss_and_its_gradient_are_those_of_the_whole(size: int, degree: int, shape: tuple[int, ...]) -> None:
    logits, target = samples(size, *shape)
    loss, gradient = whole_loss(logits, target, scale=0.3)
    ranks = divided_loss(logits, target, degree, scale=0.3)
    for own_loss, weight, *_ in ranks:
        torch.testing.assert_close(own_loss, loss, rtol=1e-13, atol=1e-13)
        assert int(weight) == target.numel() - 1
    joined = torch.cat([rank[2] for rank in ranks], -1)
    torch.testing.assert_close(joined[..., :size], gradient, rtol=1e-13, atol=1e-13)
    assert not joined[..., size:].any()


def test_an_ignored_id_may_be_one_of_the_vocabulary() -> None:
    logits, target = samples(131, 40)
    target = target.clamp(min=0)
    target[5:20] = 3
    loss, gradient = whole_loss(logits, target, ignore_index=3)
    ranks = divided_loss(logits, target, 4, ignore_index=3)
    torch.testing.assert_close(ranks[0][0], loss, rtol=1e-13, atol=1e-13)
    assert [int(rank[1]) for rank in ranks] == [int((target != 3).sum())] * 4
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks], -1)[..., :131], gradient, rtol=1e-13, atol=1e-13)


def test_where_no_target_counts_loss_weight_and_gradient_are_zero() -> None:
    logits, target = samples(131, 6)
    for loss, weight, gradient, *_ in divided_loss(logits, torch.full_like(target, -100), 2):
        assert (float(loss), int(weight)) == (0.0, 0)
        assert not gradient.any()


def test_logits_of_16_bits_give_a_loss_of_fp32() -> None:
    logits, target = samples(131, 3, 5, dtype=torch.bfloat16)
    loss, gradient = whole_loss(logits, target)
    ranks = divided_loss(logits, target, 4)
    assert {(rank[0].dtype, rank[2].dtype) for rank in ranks} == {(torch.float32, torch.bfloat16)}
    torch.testing.assert_close(ranks[0][0], loss, rtol=1e-6, atol=0)
    joined = torch.cat([rank[2] for rank in ranks], -1)[..., :131]
    torch.testing.assert_close(joined, gradient, rtol=2**-8, atol=1e-7)


def test_large_logits_of_another_rank_overflow_nothing() -> None:
    logits, target = samples(8, 4)
    logits[:, 6] = 1e5
    loss, gradient = whole_loss(logits, target)
    ranks = divided_loss(logits, target, 4)
    torch.testing.assert_close(ranks[0][0], loss, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat([rank[2] for rank in ranks], -1), gradient, rtol=1e-13, atol=1e-13)


def test_three_numbers_per_target_are_exchanged_and_none_in_the_backward() -> None:
    logits, target = samples(131, 3, 5)
    for *_, calls, forward in divided_loss(logits, target, 2):
        assert calls == [("all_reduce_max", 15), ("all_reduce", 15), ("all_reduce", 15)]
        assert forward == len(calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_fp32_number_is_kept_per_own_logit(dtype: torch.dtype) -> None:
    group = ShardGroup(2, 0)
    logits, target = samples(512, 64, dtype=dtype)
    part = logits[:, :256].clone().requires_grad_()
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.setdefault(id(value), value), lambda value: value):
        vocabulary_cross_entropy(part, target, group.name, 512)
    assert sum(value.nbytes for value in kept.values() if value.dim() == 2) == 64 * 256 * 4
    assert sum(value.nbytes for value in kept.values() if value.dim() < 2) <= 64 * 20


@pytest.mark.parametrize("bad", [131, -1])
def test_a_target_that_is_no_id_is_refused_by_every_rank(bad: int) -> None:
    """131 is padding of the last rank, and none of the others' ids."""
    parts, target = cut(torch.zeros(3, 131), 2, -1, 0.0), torch.tensor([0, bad, 130])

    def rank(group: ShardGroup, exchange: RankOrder) -> str:
        with pytest.raises(IndexError) as found:
            vocabulary_cross_entropy(parts[group.index], target, group.name, 131)
        return str(found.value)

    assert all(
        told.startswith("of ids that must be from 0 to 130") and told.endswith(str(bad)) for told in run_shards(2, rank)
    )


def test_probabilities_are_refused_and_whole_logits_are_there_for_them() -> None:
    logits, _ = samples(131, 3, 5)
    parts = cut(logits, 4, -1, 1e4)

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Tensor]:
        part = parts[group.index].clone().requires_grad_()
        with pytest.raises(TypeError, match="probabilities"):
            vocabulary_cross_entropy(part, logits.softmax(-1), group.name, 131)
        whole = whole_logits(part, group.name, 131)
        return whole.detach(), torch.autograd.grad((whole**2).sum(), part)[0]

    ranks = run_shards(4, rank)
    assert all(torch.equal(whole, logits) for whole, _ in ranks)
    assert torch.equal(torch.cat([gradient for _, gradient in ranks], -1)[..., :131], 2 * logits)


class Scaled(nn.Embedding):
    """Does more in its forward than to look up, as some published models' embeddings do."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 2.5 + 1.0


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("padding_idx", [None, 0, 70, 130])
@pytest.mark.parametrize("degree", [2, 4])
def test_an_embedding_and_its_gradient_are_those_of_the_whole(
    degree: int, padding_idx: int | None, kind: type[nn.Embedding]
) -> None:
    generator = torch.Generator().manual_seed(degree)
    table = torch.randn(131, 6, dtype=torch.float64, generator=generator)
    ids = torch.randint(0, 131, (4, 30), generator=generator)
    ids[0, :5] = torch.tensor([0, 70, 130, 70, 130])
    factor = torch.randn(4, 30, 6, dtype=torch.float64, generator=generator)
    leaf = table.clone().requires_grad_()
    expected = functional.embedding(ids, leaf, padding_idx)
    expected = expected * 2.5 + 1.0 if kind is Scaled else expected
    (wanted,) = torch.autograd.grad((expected * factor).sum(), leaf)
    parts = cut(table, degree, 0, 0.0)

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Tensor]:
        rows = len(parts[group.index])
        module = kind(rows, 6, _weight=parts[group.index].clone())
        module.padding_idx = own_padding_index(padding_idx, module.weight, group.name)
        made = vocabulary_embedding(ids, module.weight, module.forward, group.name, 131)
        (gradient,) = torch.autograd.grad((made * factor).sum(), module.weight)
        assert exchange.calls == [("all_reduce", 4 * 30 * 6)]
        return made.detach(), gradient

    ranks = run_shards(degree, rank)
    assert all(torch.equal(made, expected) for made, _ in ranks)
    joined = torch.cat([gradient for _, gradient in ranks])
    torch.testing.assert_close(joined[:131], wanted, rtol=1e-13, atol=1e-13)
    assert not joined[131:].any()


@pytest.mark.parametrize("bad", [131, -1])
def test_an_id_without_a_row_is_refused_by_every_rank(bad: int) -> None:
    parts = cut(torch.zeros(131, 2), 2, 0, 0.0)

    def rank(group: ShardGroup, exchange: RankOrder) -> str:
        part = parts[group.index]
        with pytest.raises(IndexError) as found:
            vocabulary_embedding(torch.tensor([bad]), part, lambda ids: part[ids], group.name, 131)
        return str(found.value)

    assert all(told.endswith(str(bad)) for told in run_shards(2, rank))
