"""Stages on different numbers of ranks train what one process trains on whole batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from late_weights import ADAM, MOMENTUM, Optimizer, recurrence, train
from late_weights import make_batches as regression
from test_equality import make_batches
from test_twins import make_model, train_twins
from torch.nn import functional

from runner.schedule.catalogue import registry

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("name", "replicas", "microbatches"),
    [("1f1b", (2, 1), 5), ("gpipe", (1, 2, 1), 4), ("1f1b", (2, 1, 3), 7), ("gpipe", (3, 1), 3)],
)
def test_replicas_of_stages_equal_whole_batches(name: str, replicas: tuple[int, ...], microbatches: int) -> None:
    """23 samples: micro-batches differ in size; the reference has none."""
    schedule = registry.build(name, ranks=sum(replicas), microbatches=microbatches, replicas=replicas)
    assert [len(schedule.copies_of(stage)) for stage in range(schedule.stages)] == list(replicas)
    batches = make_batches(23)
    steps, weights = train_twins(make_model, batches, schedule, optimizer=SGD)

    model = make_model()
    optimizer = SGD(model.parameters())
    losses = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    for rank in steps:
        torch.testing.assert_close([step.loss for step in rank], losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights, dict(model.state_dict()), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "replicas", "count", "lags", "optimizer"),
    [
        # As PipeDream says it: a rank of stage s has ceil(ranks behind it / its own) micro-batches of its own ahead.
        ("pipedream", (2, 1), 2, (2, 0), MOMENTUM),
        ("pipedream", (1, 2), 2, (2, 0), ADAM),
        ("pipedream", (2, 1, 3), 6, (4, 3, 0), MOMENTUM),
        ("pipedream_vsync", (1, 2, 1), 2, (3, 3, 3), MOMENTUM),
        ("pipedream_2bw", (2, 1), 4, (4, 4), ADAM),
        ("pipedream_2bw", (1, 3), 3, (3, 3), MOMENTUM),
    ],
)
def test_replicas_that_never_flush_are_their_recurrence(
    name: str, replicas: tuple[int, ...], count: int, lags: tuple[int, ...], optimizer: Optimizer
) -> None:
    """Every rank of a stage reads the versions that the stage's micro-batches read, and all sum their gradients."""
    schedule = registry.build(name, ranks=sum(replicas), microbatches=count, replicas=replicas)
    batches = regression(2 * count + 1)
    found = train(batches, schedule, count=count, optimizer=optimizer)
    losses, weights = recurrence(batches, lags, layers=len(replicas), count=count, optimizer=optimizer)
    for rank in found.losses:
        torch.testing.assert_close(rank, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.weights, weights, rtol=0, atol=1e-6)
    assert [found.held[stage] for stage in sorted(found.held)] == [1 - (-lag // count) for lag in lags]
    drained = train(batches, schedule, count=count, optimizer=optimizer, drained_after=(1, 4))
    assert drained.losses == found.losses
