"""Forwards and backwards of a stage on different ranks give what one process gives, with both copies of it equal."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from reference import train
from small_models import token_loss
from test_twins import adamw, assert_twins_are_equal, make_batches, make_model, make_tied, token_batches, train_twins
from torch import nn
from torch.nn import functional

from runner.model.layers import layers_of
from runner.model.ties import find_ties, with_all_names
from runner.schedule.catalogue import registry
from runner.schedule.values import Schedule


@pytest.mark.parametrize("clip_norm", [None, 0.05], ids=["free", "clip"])
@pytest.mark.parametrize(("ranks", "batch"), [(2, 9), (3, 12), (4, 16), (5, 23)])
def test_equals_one_process_bitwise(ranks: int, batch: int, clip_norm: float | None) -> None:
    """Uneven micro-batches; odd numbers of ranks have a stage in the middle with one copy."""
    schedule = registry.build("pipefb", ranks=ranks, microbatches=5)
    options: dict[str, Any] = {"clip_norm": clip_norm, "optimizer": adamw}
    results = train_twins(make_model, functional.cross_entropy, make_batches(batch), schedule, **options)
    model = make_model()
    losses = train(model, functional.cross_entropy, make_batches(batch), count=5, **options)
    assert_twins_are_equal([copies for _, copies in results], schedule)
    weights = {name: value for _, copies in results for state in copies.values() for name, value in state.items()}
    assert all([step.loss for step in steps] == losses for steps, _ in results)
    assert [key for key, value in model.state_dict().items() if not torch.equal(weights[key], value)] == []


def make_random(dropout: float = 0.3) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Dropout(dropout), nn.GELU()) for _ in range(6)))


def test_dropout_is_drawn_again_alike_on_the_other_rank() -> None:
    """The forward's losses and the backward's gradients see one mask: as 1F1B, which has them on one rank."""
    options: dict[str, Any] = {"pipeline": 3, "data": 1, "count": 4, "optimizer": adamw}
    batches = [(x, torch.zeros_like(x)) for x, _ in make_batches(10)]
    made = train_in_threads(make_random, functional.mse_loss, batches, schedule=_order(3, 4), **options)
    expected = train_in_threads(make_random, functional.mse_loss, batches, schedule="1f1b", **options)
    assert made[0] == expected[0]
    assert all(torch.equal(made[1][name], value) for name, value in expected[1].items())


def test_tied_weights_replicas_and_empty_microbatches() -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    batches = token_batches(7)
    options: dict[str, Any] = {"pipeline": 3, "data": 2, "count": 4, "clip_norm": 0.1, "optimizer": sgd}
    losses, weights = train_in_threads(make_tied, token_loss, batches, schedule=_order(3, 4), **options)
    model = make_tied()
    expected = train(model, token_loss, batches, replicas=2, count=4, clip_norm=0.1, optimizer=sgd)
    torch.testing.assert_close(losses[0], expected, rtol=1e-5, atol=0)
    whole = with_all_names(weights, find_ties(layers_of(make_tied(), 0)))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(whole[key], value, rtol=1e-4, atol=1e-6)


def _order(ranks: int, microbatches: int) -> Schedule:
    return registry.build("pipefb", ranks=ranks, microbatches=microbatches)
