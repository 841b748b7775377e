"""Micro-batches with shares of their own give, bit for bit, what one process gives with the same micro-batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from layouts import train_in_threads
from test_equality import make_batches, make_model
from torch import Tensor
from torch.nn import functional

from runner.schedule.catalogue import registry

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "ranks", "data", "shares", "sizes"),
    [
        ("1f1b", 4, 1, (1, 1, 2, 2, 2), ((2, 2, 4, 4, 4),)),  # the first of four in two halves
        ("1f1b", 3, 1, (1, 1, 1, 1, 2, 2), ((2, 2, 2, 2, 4, 4),)),  # two sliced ones
        ("1f1b_eager", 2, 1, (0.5, 3, 0.5), ((2, 12, 2),)),
        ("gpipe", 2, 2, (3, 1), ((6, 2), (6, 2))),
        ("naive", 2, 1, (1, 2, 4), ((2, 5, 9),)),  # ends at 2.3, 6.9 and 16
        ("gpipe", 1, 1, (2, 1, 1), ((8, 4, 4),)),
    ],
)
def test_each_share_is_a_microbatch(
    name: str, ranks: int, data: int, shares: tuple[float, ...], sizes: tuple[tuple[int, ...], ...]
) -> None:
    batches = make_batches(16, steps=3)
    schedule = registry.build(name, ranks=ranks, microbatches=len(shares), shares=shares)
    losses, weights = train_in_threads(
        partial(make_model, torch.nn.LayerNorm), functional.cross_entropy, batches, schedule=schedule, pipeline=ranks,
        data=data, count=len(shares), shares=shares, optimizer=SGD,
    )  # fmt: skip
    model = make_model(torch.nn.LayerNorm)
    expected = alone(model, batches, sizes)
    assert losses == [expected] * len(losses)
    state = model.state_dict()
    assert [key for key, value in state.items() if not torch.equal(weights[key], value)] == []


def alone(
    model: torch.nn.Module, batches: list[tuple[Tensor, Tensor]], sizes: tuple[tuple[int, ...], ...]
) -> list[float]:
    """Train on the given micro-batches of each replica, one after the other; return the losses."""
    optimizer, losses = SGD(model.parameters()), []
    parameters = list(model.parameters())
    for inputs, targets in batches:
        sums, total = [torch.zeros_like(each) for each in parameters], 0.0
        replicas = zip(inputs.tensor_split(len(sizes)), targets.tensor_split(len(sizes)), sizes, strict=True)
        for given, wanted, own in replicas:
            optimizer.zero_grad()
            parts = (torch.split(value, list(own)) for value in (given.clone(), wanted))
            for x, y in zip(*parts, strict=True):
                loss = functional.cross_entropy(model(x), y) * len(x)
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            for into, each in zip(sums, parameters, strict=True):
                assert each.grad is not None
                into += each.grad
        for each, gradient in zip(parameters, sums, strict=True):
            each.grad = gradient / len(inputs)
        optimizer.step()
        losses.append(total / len(inputs))
    return losses
