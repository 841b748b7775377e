"""Muon for matrices and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from shard_ranks import RankExchange, run_sharded
from torch import Tensor, nn
from torch.nn import functional

from runner.config.compose.resolve import resolve
from runner.config.rules.sections import rules
from runner.config.schema import OptimizerConfig
from runner.model.sharded.group import ShardGroup
from runner.model.sharded.values import HeldPart, Shard
from runner.optim.catalogue.registry import optimizer_of
from runner.optim.states.whole_norms import mark_as_part

SECTION = OptimizerConfig(name="muon", lr=0.01, momentum=0.9, weight_decay=0.1)


def make(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return optimizer_of(SECTION).make(SECTION, parameters)


def make_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 6))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    pairs = [torch.randn(2, 8, 6, generator=generator) for _ in range(steps)]
    return [(inputs, targets) for inputs, targets in pairs]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: list[tuple[Tensor, Tensor]]) -> None:
    for inputs, targets in steps:
        model.zero_grad()
        functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # the library's
        for optimizer in optimizers:
            optimizer.step()


def test_it_is_torchs_two_optimizers() -> None:
    one, two = make_model(), make_model()
    train(one, [make(list(one.parameters()))], batches(5))
    matrices = [each for each in two.parameters() if each.dim() == 2]
    others = [each for each in two.parameters() if each.dim() != 2]
    muon = torch.optim.Muon(matrices, lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    train(two, [muon, torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)], batches(5))
    for own, plain in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(own, plain)


def test_it_goes_on_from_its_saved_states() -> None:
    whole, first = make_model(), make_model()
    steps = batches(6)
    train(whole, [make(list(whole.parameters()))], steps)
    optimizer = make(list(first.parameters()))
    train(first, [optimizer], steps[:3])
    second = make_model()
    second.load_state_dict(first.state_dict())
    resumed = make(list(second.parameters()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(second, [resumed], steps[3:])
    for own, plain in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(own, plain)


def test_a_matrix_is_updated_whole() -> None:
    """ZeRO's partitions would cut it; stage 0 sums gradients alone."""
    words = ["model=mlp", "optimizer=muon", "parallelism.data=2", "device=cpu"]
    (problem,) = rules(resolve([*words, "zero.stage=1"]))
    assert problem.line().startswith("optimizer.name = muon: must be one of ")
    assert "Flat partitions cut weights anywhere" in problem.line()
    assert [*rules(resolve([*words, "zero.stage=0"]))] == []


def test_nor_does_the_runner_share_out_its_states() -> None:
    """A split backward has the runner's own sharing, of whole weights, which Muon's two sorts of states do not have."""
    words = ["model=mlp", "optimizer=muon", "parallelism.pipeline=2", "parallelism.data=2", "device=cpu"]
    config = resolve([*words, "schedule=zb_h1", "schedule.microbatches=2", "zero.stage=1"])
    assert any("optimizer.name = muon" in problem.line() for problem in rules(config))


@pytest.mark.parametrize(
    ("shape", "dim", "pieces", "padding"),
    [((12, 8), 0, 1, 0), ((8, 12), 1, 1, 0), ((12, 8), 0, 3, 0), ((7, 8), 0, 1, 1)],
)
def test_parts_of_a_matrix_are_updated_as_the_whole_is(
    shape: tuple[int, int], dim: int, pieces: int, padding: int
) -> None:
    """Bit for bit, where the gradients are the same bits: the reference is one whole matrix in one process."""
    generator = torch.Generator().manual_seed(3)
    start, *gradients = torch.randn(4, *shape, generator=generator).unbind()
    whole = nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([whole], lr=0.01, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        whole.grad = gradient.clone()
        optimizer.step()  # type: ignore[no-untyped-call]  # torch's

    def rank(group: ShardGroup, exchange: RankExchange) -> Tensor:
        group.exchange = exchange
        shard = Shard(dim, group.index, group.degree, shape, pieces, padding)
        part = mark_as_part(nn.Parameter(shard.cut(start)), HeldPart(shard, group))
        own = make([part])
        for gradient in gradients:
            part.grad = shard.cut(gradient)
            own.step()
        assert exchange.calls == ["all_gather"] * len(gradients)
        updated: Tensor = part.detach()
        return updated

    parts = run_sharded(2, rank)
    joined = Shard(dim, 0, 2, shape, pieces, padding).join(parts)
    assert torch.equal(joined, whole.detach())
