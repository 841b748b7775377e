"""The operators between ranks that share a layer's weights: plain torch on all ranks' tensors is their reference.

All numbers are small integers, so that sums are exact in whatever order.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from shard_threads import RankOrder, run_shards
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runner.model.sharded.group import ShardGroup
from runner.model.sharded.operators import enter, gather, gather_parts, largest, leave, own_part, scatter_sum
from runner.model.sharded.vocabulary import vocabulary_cross_entropy, vocabulary_embedding

DIMS = (0, 1, -1)


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


@dataclass(frozen=True)
class Pair:
    """An operator and what it means.

    ``plain(inputs, dim)`` gives all ranks' results from all ranks' inputs. ``one_input``: these are one value, which
    all ranks have. ``one_reader``: the results are read by the same computation everywhere, which counts once.
    """

    operator: Callable[[Tensor, int, str], Tensor]
    plain: Callable[[list[Tensor], int], list[Tensor]]
    one_input: bool = False
    one_reader: bool = False


def total(inputs: list[Tensor]) -> Tensor:
    return torch.stack(inputs).sum(0)


PAIRS = {
    "enter": Pair(lambda value, dim, group: enter(value, group), lambda inputs, dim: inputs, one_input=True),
    "leave": Pair(
        lambda value, dim, group: leave(value, group),
        lambda inputs, dim: [total(inputs)] * len(inputs),
        one_reader=True,
    ),
    "gather": Pair(gather, lambda inputs, dim: [torch.cat(inputs, dim)] * len(inputs), one_reader=True),
    "gather_parts": Pair(gather_parts, lambda inputs, dim: [torch.cat(inputs, dim)] * len(inputs)),
    "scatter_sum": Pair(scatter_sum, lambda inputs, dim: list(total(inputs).chunk(len(inputs), dim))),
    "own_part": Pair(own_part, lambda inputs, dim: list(inputs[0].chunk(len(inputs), dim)), one_input=True),
}


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives the names of the operators that are called in the block."""

    def __enter__(self) -> list[str]:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._seen: list[str] = []
        return self._seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("recorded", [False, True], ids=["past torch.library", "recorded"])
def test_forward_and_backward_are_those_of_plain_torch(name: str, degree: int, dim: int, recorded: bool) -> None:
    """Values and gradients lie in memory in another order than in the tensor, as those of views do.

    Where a mode records operators, it sees those of the ranks; else they are called in a shorter way.
    """
    pair = PAIRS[name]
    leaves = [numbers(12, 24, seed=0 if pair.one_input else rank).requires_grad_() for rank in range(degree)]
    leaves = [leaves[0]] * degree if pair.one_input else leaves
    results = pair.plain([leaf.t() for leaf in leaves], dim)
    factors = [
        numbers(*reversed(results[rank].shape), seed=50 + (0 if pair.one_reader else rank)).t()
        for rank in range(degree)
    ]
    read = zip(results[:1] if pair.one_reader else results, factors, strict=False)
    gradients = torch.autograd.grad(total([(result * factor).sum() for result, factor in read]), leaves)

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Tensor]:
        leaf = leaves[group.index].detach().clone().requires_grad_()
        with _Recording() if recorded else nullcontext([]) as seen:  # type: ignore[no-untyped-call]
            made = pair.operator(leaf.t(), dim, group.name)
            assert made.is_contiguous()
            gradient = torch.autograd.grad(made, leaf, factors[group.index])[0]
        assert sum(each.startswith("runner_shards::") for each in seen) == recorded * (1 if name == "leave" else 2)
        return made.detach(), gradient

    for index, (made, gradient) in enumerate(run_shards(degree, rank)):
        assert torch.equal(made, results[index])
        assert torch.equal(gradient, gradients[index])


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_the_largest_of_all_ranks_has_no_gradient(degree: int) -> None:
    values = [numbers(5, 7, seed=rank).requires_grad_() for rank in range(degree)]
    found = run_shards(degree, lambda group, exchange: largest(values[group.index], group.name))
    assert all(torch.equal(each, torch.stack(values).amax(0)) and not each.requires_grad for each in found)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dim", DIMS)
def test_shapes_are_known_without_ranks(name: str, dim: int) -> None:
    """Of fake tensors and of a group that stands alone, the shapes and the gradient's are those of real ranks."""
    operator = PAIRS[name].operator

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[torch.Size, tuple[int, ...]]:
        made = operator(numbers(12, 24, seed=0), dim, group.name)
        return made.shape, made.stride()

    def shapes(group: ShardGroup) -> tuple[torch.Size, tuple[int, ...]]:
        leaf = torch.zeros(24, 12, dtype=torch.bfloat16).requires_grad_()
        made = operator(leaf.t(), dim, group.name)
        (gradient,) = torch.autograd.grad(made, leaf, torch.zeros_like(made))
        assert (gradient.shape, gradient.dtype, made.dtype) == (leaf.shape, torch.bfloat16, torch.bfloat16)
        return made.shape, made.stride()

    expected = run_shards(3, rank)[1]
    assert shapes(ShardGroup(3, 1)) == expected
    with FakeTensorMode():
        assert shapes(ShardGroup(3, 1)) == expected


@pytest.mark.parametrize("operator", [own_part, scatter_sum])
def test_what_cannot_be_divided_evenly_is_refused(operator: Callable[[Tensor, int, str], Tensor]) -> None:
    group = ShardGroup(3, 1)
    with pytest.raises(ValueError, match="a dimension of 7 cannot be divided among 3 ranks"):
        operator(torch.zeros(2, 7), 1, group.name)
    with FakeTensorMode(), pytest.raises(ValueError, match="a dimension of 7"):
        operator(torch.zeros(2, 7), 1, group.name)


class Everything(nn.Module):
    """Each operator once, between linears."""

    def __init__(self, group: ShardGroup) -> None:
        super().__init__()
        self.group = group.name
        self.tokens, self.first, self.second = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        x = vocabulary_embedding(ids, self.tokens.weight, self.tokens.forward, self.group, 5)
        y = leave(self.first(enter(x, self.group)) * self.second(enter(x, self.group)), self.group)
        y = own_part(gather(y, -1, self.group), -1, self.group)
        y = scatter_sum(gather_parts(y, 0, self.group), 0, self.group)
        return vocabulary_cross_entropy(y, target, self.group, 7)[0]


def test_an_export_keeps_the_operators_and_their_backward() -> None:
    group = ShardGroup(2, 1)
    torch.manual_seed(0)
    model, ids, target = Everything(group), torch.tensor([0, 4, 3, 1]), torch.tensor([0, 6, 3, -100])
    exported = torch.export.export(model, (ids, target), strict=False).module()
    nodes = [str(node.target) for node in exported.graph.nodes if "runner_shards" in str(node.target)]
    names = [node.split(".")[1] for node in nodes]
    assert names == [
        *("own_ids", "all_reduce", "identity", "all_reduce", "all_gather", "own", "all_gather", "reduce_scatter"),
        *("own_ids", "all_reduce_max", "exponentials", "all_reduce", "all_reduce"),
    ]
    loss, again = model(ids, target), exported(ids, target)
    assert torch.equal(loss, again)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    found = torch.autograd.grad(again, [exported.get_parameter(name) for name, _ in model.named_parameters()])
    assert all(torch.equal(*each) for each in zip(gradients, found, strict=True))


def sums_back(function: Callable[[Tensor, str], Tensor]) -> int:
    """How many sums the backward of ``function`` makes on two ranks."""

    def rank(group: ShardGroup, exchange: RankOrder) -> int:
        leaf = numbers(3, 4, seed=0).requires_grad_()
        made = function(leaf * 2, group.name)
        before = len(exchange.calls)
        torch.autograd.grad(made.sum(), leaf)
        return len(exchange.calls) - before

    first, second = run_shards(2, rank)
    assert first == second
    return first


def test_query_key_and_value_share_one_entry() -> None:
    assert sums_back(lambda value, group: enter(value, group) * enter(value, group) + enter(value, group)) == 1


def test_attention_and_mlp_on_one_input_share_it_across_the_sum_between_them() -> None:
    def block(value: Tensor, group: str) -> Tensor:
        attention = leave(enter(value, group) * enter(value, group), group)
        return attention + leave(enter(value, group) * 3, group)

    assert sums_back(block) == 1


def test_two_tensors_have_two_entries_also_where_one_is_read_between() -> None:
    def crossed(value: Tensor, group: str) -> Tensor:
        memory = value + 1
        return enter(value, group) * enter(memory, group) + enter(value, group) * enter(memory, group)

    assert sums_back(crossed) == 2


def test_a_changed_tensor_enters_anew() -> None:
    group = ShardGroup(2, 0)
    value = torch.zeros(3)
    enter(value, group.name)
    value += 1
    assert torch.equal(enter(value, group.name), torch.ones(3))


def test_a_leaf_that_is_filled_again_enters_anew_in_the_next_forward() -> None:
    """A buffer into which messages are received: what writes there need not count as a change."""
    group = ShardGroup(2, 0)
    value = torch.zeros(3)
    leave(enter(value, group.name), group.name)
    value.numpy()[:] = 1
    assert torch.equal(enter(value, group.name), torch.ones(3))


def test_an_entry_without_gradients_is_not_that_of_a_forward_with_them() -> None:
    group = ShardGroup(2, 0)
    value = torch.zeros(3, requires_grad=True)
    with torch.no_grad():
        assert not enter(value, group.name).requires_grad
    assert enter(value, group.name).requires_grad
    with torch.no_grad():
        assert not enter(value, group.name).requires_grad
    later = torch.zeros(3)
    enter(later, group.name)
    assert enter(later.requires_grad_(), group.name).requires_grad


def test_a_tensor_of_inference_mode_enters() -> None:
    group = ShardGroup(2, 0)
    with torch.inference_mode():
        value = torch.ones(3)
        assert torch.equal(enter(value, group.name), value)
        value += 1
        assert torch.equal(enter(value, group.name), value)


def test_an_entry_does_not_outlive_its_tensor() -> None:
    group = ShardGroup(2, 0)
    value = torch.zeros(3)
    made = weakref.ref(enter(value, group.name))
    gc.collect()
    assert made() is not None
    del value
    assert made() is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_region_enters_anew_and_gives_the_same(reentrant: bool) -> None:
    value = numbers(3, 4, seed=0)

    def region(x: Tensor, group: ShardGroup, seen: list[Tensor]) -> Tensor:
        factors = numbers(3, 4, seed=7 + group.index)
        seen += [enter(x, group.name), enter(x, group.name)]
        assert seen[-1] is seen[-2]
        return leave((enter(x, group.name) * factors) ** 2, group.name) * x

    def rank(group: ShardGroup, exchange: RankOrder) -> tuple[Tensor, Tensor]:
        leaf, seen = value.clone().requires_grad_(), list[Tensor]()
        (plain,) = torch.autograd.grad(region(leaf * 1, group, seen).sum(), leaf)
        seen.clear()
        made = checkpoint(region, leaf * 1, group, seen, use_reentrant=reentrant)
        made.sum().backward()  # type: ignore[no-untyped-call, unused-ignore]
        assert len(seen) == 4
        assert seen[0] is not seen[2]
        assert leaf.grad is not None
        return leaf.grad, plain

    for gradient, plain in run_shards(2, rank):
        assert torch.equal(gradient, plain)
