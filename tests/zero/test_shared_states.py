"""An update shared out over replicas is the unshared one bit for bit, wherever the parts begin."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from torch import nn

from runner.optim.compression.signs import Exchange
from runner.optim.states.shared import SharedStates
from runner.schedule.catalogue.registry import build

SHAPES = [(3, 5), (7,), (1,), (4, 2)]  # 31 elements: no number of replicas divides them


class Together:
    """Replicas in threads, which meet at every gathering."""

    def __init__(self, size: int) -> None:
        self.parts = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=1500)

    def of(self, rank: int) -> Exchange:
        return OfRank(self, rank)


class OfRank:
    """One replica's side of them."""

    def __init__(self, together: Together, rank: int) -> None:
        self.together, self.rank, self.size = together, rank, len(together.parts)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.together.barrier.wait()
        self.together.parts[self.rank] = tensor.clone()
        self.together.barrier.wait()
        return list(self.together.parts)

    def all_to_all(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        raise AssertionError("states that are shared out are gathered, and nothing else")


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)  # its own: replicas in threads draw at the same time
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def set_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        parameter.grad = None if number == step == 1 else torch.randn(parameter.shape, generator=generator)


def train(parameters: list[nn.Parameter], step_once: Callable[..., Any], steps: tuple[int, ...]) -> None:
    for step in steps:
        set_gradients(parameters, step)
        step_once()


def by_replica(
    size: int, work: Callable[[int], tuple[list[nn.Parameter], int]]
) -> list[tuple[list[nn.Parameter], int]]:
    results: dict[int, tuple[list[nn.Parameter], int]] = {}
    threads = []
    for rank in range(size):

        def run(rank: int = rank) -> None:
            results[rank] = work(rank)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
    for thread in threads:
        thread.join(600)
    return [results[rank] for rank in range(size)]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_it_is_the_unshared_update_and_goes_on_from_its_states(size: int) -> None:
    expected = weights()
    plain = adamw(expected)
    train(expected, plain.step, (0, 2, 3, 4))
    first, second = Together(size), Together(size)

    def work(rank: int) -> tuple[list[nn.Parameter], int]:
        parameters = weights()
        shared = SharedStates(adamw(parameters), first.of(rank))
        train(parameters, shared.step, (0, 2))
        states = shared.whole()
        again = [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        optimizer = adamw(again)
        going_on = SharedStates(optimizer, second.of(rank))
        named: dict[torch.Tensor, Mapping[str, Any]] = {
            new: states[old] for new, old in zip(again, parameters, strict=True)
        }
        going_on.load(named, [{"lr": 0.1}])
        train(again, going_on.step, (3, 4))
        return again, sum(
            value.numel() for state in optimizer.state.values() for value in state.values() if value.dim()
        )

    for found, elements in by_replica(size, work):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert elements == 2 * -(-31 // size)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    middle = [torch.nn.Linear(7, 7) for _ in range(6)]
    return torch.nn.Sequential(torch.nn.Linear(3, 7), *middle, torch.nn.Linear(7, 2))


def squares(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    return (output - target).square().sum(), len(target)


@pytest.mark.parametrize("schedule", ["zb_h1", "chimera"])
def test_under_any_schedule_the_run_is_the_unshared_one(schedule: str) -> None:
    """Two replicas with unequal shares, clipped by the norm over all stages."""
    generator = torch.Generator().manual_seed(3)
    drawn = partial(torch.randn, generator=generator)
    batches = [(drawn(17, 3), drawn(17, 2)) for _ in range(3)]
    order = build(schedule, ranks=2, microbatches=4)
    layout: dict[str, Any] = {
        "schedule": order,
        "pipeline": 2,
        "data": 2,
        "count": 4,
        "optimizer": adamw,
        "clip_norm": 0.05,
    }
    losses, expected = train_in_threads(model, squares, batches, **layout)
    own_losses, found = train_in_threads(model, squares, batches, **layout, shared=True)
    for own, unshared in zip(own_losses, losses, strict=True):
        assert own == pytest.approx(unshared, rel=1e-6)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=2e-6, rtol=2e-6, msg=name)


def test_a_weight_without_gradient_counts_as_zero() -> None:
    parameters = weights()
    shared = SharedStates(torch.optim.SGD(parameters, lr=1.0), Together(1).of(0))
    before = [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, 1)
    shared.step()
    assert torch.equal(parameters[1], before[1])
    assert not torch.equal(parameters[0], before[0])


def test_weights_of_whole_cache_lines_begin_where_torch_lets_them_begin() -> None:
    """A matrix that begins elsewhere may be multiplied with another rounding."""
    sizes = ((3, 5), (16,), (7,), (8, 6), (32, 2))
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    before = [parameter.detach().clone() for parameter in parameters]
    SharedStates(adamw(parameters), Together(1).of(0))
    assert [each.data_ptr() % 64 for each in parameters if each.numel() % 16 == 0] == [0, 0, 0]
    assert all(map(torch.equal, parameters, before))
