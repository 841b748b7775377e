"""Targets that do not count: every layout gives the whole batch's mean, and a step without any is skipped or told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import loss_kinds
import pytest
import torch
from layouts import train_in_threads
from torch import Tensor
from torch.nn import functional as F

from runner.errors import RunFailedError
from runner.zoo.losses import cross_entropy

RATE = 0.1
Loss = Callable[[Tensor, Tensor], Any]
Batch = tuple[Tensor, Tensor]


def batches(size: int, steps: int, ignored: slice) -> list[Batch]:
    """Samples with very different numbers of targets that count; those of ``ignored`` have none."""
    x, y = loss_kinds.data(steps * size, 6, "uneven").tensors
    y[ignored] = -100
    return list(zip(x.tensor_split(steps), y.tensor_split(steps), strict=True))


def smoothed(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), label_smoothing=0.2, reduction=reduction)


def smoothed_pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return smoothed(output, target, "sum"), (target != -100).sum()


LOSSES: dict[str, tuple[Loss, Loss]] = {
    "shipped": (cross_entropy, loss_kinds.token_mean),
    "shipped, smoothed": (partial(cross_entropy, label_smoothing=0.2), smoothed),
    "shipped, weighted": (partial(cross_entropy, class_weights=loss_kinds.WEIGHTS.tolist()), loss_kinds.class_weighted),
    "own": (smoothed_pair, smoothed),
}


def plain(loss: Loss, given: Sequence[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """A loop over whole batches that passes over a batch without a target that counts."""
    model = loss_kinds.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for x, y in given:
        mean = loss(model(x), y)
        losses.append(float(mean.detach()))
        if (y != -100).any():
            optimizer.zero_grad()
            mean.backward()
            optimizer.step()
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def trained(loss: Loss, given: Sequence[Batch], **layout: Any) -> tuple[list[list[float]], dict[str, Tensor]]:
    layout = {"schedule": "gpipe", "pipeline": 1, "data": 1, "count": 1, **layout}
    optimizer = partial(torch.optim.SGD, lr=RATE)
    return train_in_threads(loss_kinds.build, loss, given, optimizer=optimizer, **layout)


@pytest.mark.parametrize("layout", [{}, {"pipeline": 2, "count": 4}, {"pipeline": 2, "data": 2, "count": 2}])
@pytest.mark.parametrize("name", LOSSES)
def test_every_layout_has_the_mean_of_the_whole_batch(name: str, layout: dict[str, Any]) -> None:
    loss, mean = LOSSES[name]
    given = batches(8, 4, slice(16, 18))  # a whole micro-batch of the third step
    expected, weights = plain(mean, given)
    losses, found = trained(loss, given, **layout)
    assert all(each == pytest.approx(expected, rel=2e-6) for each in losses)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pipeline": 2, "count": 2},
        {"data": 2, "shared": True},
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "count": 2, "schedule": "zb_h1", "post_validation": True},
    ],
)
def test_a_step_in_which_nothing_counts_is_skipped(layout: dict[str, Any]) -> None:
    given = batches(2, 6, slice(4, 6))
    expected, weights = plain(loss_kinds.token_mean, given)
    losses, found = trained(cross_entropy, given, skip_nonfinite=True, **layout)
    assert math.isnan(expected[2])
    assert all(each == pytest.approx(expected, rel=2e-6, nan_ok=True) for each in losses)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("layout", "advice"),
    [
        ({"pipeline": 2, "count": 2}, "; trainer.on_nonfinite=skip goes on without its update"),
        ({"pipeline": 2, "count": 2, "schedule": "pipedream_2bw"}, ""),  # which cannot skip
    ],
)
def test_otherwise_the_run_ends_and_says_why(layout: dict[str, Any], advice: str) -> None:
    with pytest.raises(RunFailedError) as caught:
        trained(cross_entropy, batches(2, 6, slice(4, 6)), **layout)
    assert str(caught.value) == (
        f"step 3: nothing in it counts, because the weights of its losses add up to 0{advice}; "
        "the weights are those of the step before"
    )
