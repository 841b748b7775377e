"""Optimizer states in the form that their optimizer expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.checkpoint.state import as_counted, own_buffers
from runner.model.layers import build_stage, layers_of


class DeepSpeedCPUAdam(torch.optim.SGD):
    __module__ = "deepspeed.ops.adam.cpu_adam"


@pytest.mark.parametrize("saved", [3, torch.tensor(3.0)])
def test_an_optimizer_goes_on_from_the_steps_of_another_kind(saved: int | torch.Tensor) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    counted = as_counted(DeepSpeedCPUAdam([weight]), {"step": saved})["step"]
    assert (counted, type(counted)) == (3, int)
    moments: dict[str, Any] = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    adam = torch.optim.AdamW([weight])
    adam.state[weight] = as_counted(adam, {"step": saved, **moments})
    weight.grad = torch.ones(2)
    adam.step()
    assert adam.state[weight]["step"] == 4


def test_states_without_steps_stay_as_they_are() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    assert as_counted(sgd, {"momentum_buffer": None}) == {"momentum_buffer": None}


def test_every_persistent_buffer_is_saved_whatever_its_type() -> None:
    norm = torch.nn.BatchNorm1d(3)
    norm.register_buffer("mask", torch.tensor([True, False]))
    norm.register_buffer("scratch", torch.zeros(2), persistent=False)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), norm)
    model(torch.randn(4, 3))
    found = own_buffers({0: build_stage(layers_of(model, 0), 0, 1)})
    expected = {name: value for name, value in model.state_dict().items() if name not in dict(model.named_parameters())}
    assert sorted(found) == ["1.mask", "1.num_batches_tracked", "1.running_mean", "1.running_var"] == sorted(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
