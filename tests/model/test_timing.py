"""Seconds of a layer's forward, of its backward, and of the backward's two parts, against layers that sleep."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from narrow import present
from plan_profiles import layer, model
from torch import nn

from runner.config.compose.resolve import resolve
from runner.profiling.model import profile_model
from runner.profiling.timing import can_be_timed

FORWARD, OF_INPUT, OF_WEIGHT = 0.01, 0.02, 0.03


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: nn.Parameter | torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeping(nn.Module):
    """Its weight reaches the product through a function of its own, so that it waits for W."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, value: nn.Parameter | torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = Sleep.apply(value, FORWARD, OF_INPUT) @ Sleep.apply(self.weight, 0.0, OF_WEIGHT)  # type: ignore[no-untyped-call, unused-ignore]  # the library's
        return made


def sleeping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), Sleeping(), nn.Linear(6, 5))


@pytest.mark.costly
def test_each_part_of_a_step_has_its_own_seconds() -> None:
    user = ("model.target=test_timing:sleeping", "data.target=user_code:points", "loss.target=user_code:mean")
    profile = profile_model(resolve([*user, "device=cpu", "data.batch_size=4"]))
    assert profile.seconds_source == "measured"
    first, slow, _ = profile.layers
    assert slow.forward_seconds >= FORWARD
    assert slow.backward_seconds >= OF_INPUT + OF_WEIGHT
    assert present(slow.input_gradient_seconds) >= OF_INPUT
    assert present(slow.weight_gradient_seconds) >= OF_WEIGHT  # half of the backward would be less
    assert slow.split_seconds == (slow.input_gradient_seconds, slow.weight_gradient_seconds)
    assert first.input_gradient_seconds is not None
    assert present(first.weight_gradient_seconds) > 0
    assert profile.loss.weight_gradient_seconds is not None


class Counting(nn.Linear):
    """Counts its forwards on real tensors, of all layers together."""

    forwards = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        Counting.forwards += type(value) is torch.Tensor
        return super().forward(value)


def counting() -> nn.Sequential:
    return nn.Sequential(*(Counting(6, 6) for _ in range(8)), Counting(6, 5))


@pytest.mark.costly
def test_of_layers_that_are_alike_some_are_timed() -> None:
    """The first takes an input without gradient, and the last is smaller: so three of seven are timed."""
    user = ("model.target=test_timing:counting", "data.target=user_code:points", "loss.target=user_code:mean")
    Counting.forwards = 0
    profile = profile_model(resolve([*user, "device=cpu", "data.batch_size=4"]))
    timed, alike = profile.layers[1:4], profile.layers[4:8]
    timing = len(alike) + (1 + 3 + 1) * 2 * 4  # two forwards in each of four runs
    contracts, loss = 3 * 4, 2 * len(profile.layers)  # four forwards of each kind of layer; two batches
    assert Counting.forwards == timing + contracts + loss
    for name in ("forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradient_seconds"):
        assert {getattr(layer, name) for layer in alike} == {sorted(getattr(layer, name) for layer in timed)[1]}


def test_many_layers_that_are_alike_are_not_too_many_to_be_timed() -> None:
    """A hundred layers of 1 and 2 GFLOP: 1.06e11 where three run backward, of the 2e11 that may be timed."""
    config = resolve(["model=mlp", "device=cpu"])
    rows = [layer(forward_flops=1e9, backward_flops=2e9) for _ in range(100)]
    assert can_be_timed(config, model(rows))
    assert not can_be_timed(config, model([replace(row, num_parameters=at) for at, row in enumerate(rows)]))
