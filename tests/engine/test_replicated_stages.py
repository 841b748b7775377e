"""Stages on different numbers of ranks train what one process trains on whole batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
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
