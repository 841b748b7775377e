"""NaN or infinity: the run stops, and the error names the layer, the stage and the micro-batch where it began."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from layouts import train_in_threads
from torch import nn

from runner.errors import RunFailedError

COUNT, BATCH = 4, 16
sgd = partial(torch.optim.SGD, lr=0.1)


class Breaks(nn.Module):
    """Identity that makes a NaN, forward or backward, of samples that carry a mark."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        marked = x[:, -1:] > 50
        if self.phase == "forward":
            return torch.where(marked, torch.nan, x)
        if self.phase == "backward" and marked.any() and x.requires_grad:
            x = x.clone()
            x.register_hook(lambda gradient: gradient * math.nan)  # type: ignore[no-untyped-call]  # the library's
        return x * 1.0


class Passes(nn.Module):
    """A linear layer beside the mark, which it hands on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.linear(x[:, :-1]), x[:, -1:]], dim=1)


def run(
    phase: str,
    at: int,
    *,
    pipeline: int,
    data: int = 1,
    marked: int | None = 9,
    loss: Callable[..., Any] | None = None,
    unlike: slice | None = None,
    **options: Any,
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Sample ``marked`` of step 1 breaks in layer ``at``; the targets of ``unlike`` are far from all others."""

    def model() -> nn.Sequential:
        torch.manual_seed(1)
        layers: list[nn.Module] = [Passes() for _ in range(6)]
        layers[at] = Breaks(phase)
        return nn.Sequential(*layers)

    generator = torch.Generator().manual_seed(3)
    drawn = partial(torch.randn, BATCH, 7, generator=generator)
    batches: list[tuple[torch.Tensor, torch.Tensor]] = [(drawn(), drawn()) for _ in range(3)]
    if marked is not None:
        batches[1][0][marked, -1] = 100.0
    if unlike is not None:
        batches[1][1][unlike] = 100.0
    return train_in_threads(
        model, loss or nn.functional.mse_loss, batches, schedule="1f1b", pipeline=pipeline, data=data,
        count=COUNT // data, **{"optimizer": sgd, **options},
    )  # fmt: skip


@pytest.mark.parametrize(("at", "stage", "data"), [(0, 0, 1), (3, 1, 2)])
def test_a_forward_is_named(at: int, stage: int, data: int) -> None:
    with pytest.raises(RunFailedError) as caught:
        run("forward", at, pipeline=3, data=data)
    assert str(caught.value) == (
        f"step 2: the loss is nan; first not finite: the output of layer {at} on stage {stage}, micro-batch 2; "
        "the weights are those of the step before"
    )


def test_a_single_process_names_it_as_well() -> None:
    with pytest.raises(RunFailedError, match="the output of layer 3 on stage 0, micro-batch 2"):
        run("forward", 3, pipeline=1)


def test_a_backward_is_named() -> None:
    """The loss is finite; the gradient of what the layer before gave is the first that is not."""
    with pytest.raises(RunFailedError, match=r"step 2: the loss is [\d.]+, but a gradient is not finite") as caught:
        run("backward", 4, pipeline=3)
    assert "first not finite: the gradient of the output of layer 3 on stage 1, micro-batch 2" in str(caught.value)


def test_an_input_that_is_not_finite_is_named() -> None:
    def poisoned(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, torch.where(target > 2.5, torch.nan, target))

    with pytest.raises(RunFailedError, match=r"the loss is nan; first not finite: the loss function, micro-batch"):
        run("forward", 3, pipeline=2, marked=None, loss=poisoned)


def test_a_mean_over_nothing_is_told_with_what_would_be_right() -> None:
    def of_unmarked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target)[target[:, 0] < 50].pow(2).mean()

    with pytest.raises(RunFailedError, match=r"micro-batch 2 \(a mean over nothing that counts is NaN, where \(sum, w"):
        run("none", 5, pipeline=2, marked=None, loss=of_unmarked, unlike=slice(8, 12))


def test_weights_that_are_not_finite_are_named() -> None:
    with pytest.raises(RunFailedError, match=r"layer 0 on stage 0 \(of which the weights already had it\)"):
        run("none", 5, pipeline=2, marked=None, optimizer=partial(torch.optim.SGD, lr=math.inf))


def test_a_gradient_of_a_weight_is_named() -> None:
    class RootOfNothing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale.sqrt()

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 3), RootOfNothing(), nn.Linear(3, 3))

    batch = (torch.ones(8, 3), torch.ones(8, 3))
    with pytest.raises(RunFailedError, match=r"first not finite: the gradient of 1.scale on stage 1, micro-batch 0"):
        train_in_threads(
            model, nn.functional.mse_loss, [batch], schedule="gpipe", pipeline=3, data=1, count=2, optimizer=sgd
        )


def test_a_skipped_step_reports_its_loss_and_the_run_goes_on() -> None:
    losses, weights = run("forward", 3, pipeline=3, skip_nonfinite=True)
    assert [math.isfinite(loss) for loss in losses[0]] == [True, False, True]
    assert all(torch.isfinite(value).all() for value in weights.values())
