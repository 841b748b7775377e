"""Tensors are told apart by what they are, also where one takes the place in memory of another one that is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.run_windows import states_of_buffers
from runner.model.layers import LayerSource
from runner.model.walk import Walk
from runner.optim.states.backup import OptimizerBackup
from runner.profiling.odd_tensors import OddTensors

MANY = 8  # objects, one after the other: the places of the first ones are used again


class Counting(nn.Module):
    """Has a weight of few bits, and a buffer that is another tensor after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self) -> None:
        self.seen = self.get_buffer("seen") + 1


def test_layers_that_are_built_one_by_one_are_not_taken_for_one() -> None:
    seen = OddTensors()
    for index in range(MANY):
        source = LayerSource(index, f"{index}", Counting)
        layer = source.build()
        seen.see(source, layer)
        layer()
        seen.changed(source, layer)
        del layer
    assert [weight.name for weight in seen.weights] == [f"{index}.weight" for index in range(MANY)]
    assert seen.changed_buffers() == tuple(f"{index}.seen" for index in range(MANY))
    assert seen.shared_buffers() == ()


def test_a_buffer_that_is_another_one_after_some_forwards_has_changed() -> None:
    stage: Any = Counting()
    before = states_of_buffers({0: stage})
    for _ in range(MANY):
        stage()
        assert states_of_buffers({0: stage}) != before
    before = states_of_buffers({0: stage})
    assert states_of_buffers({0: stage}) == before


class Growing(torch.optim.SGD):
    """Has another state, of another size, after each step."""

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["history"] = torch.ones(len(self.state[weight].get("history", ())) + 1)


def test_states_that_a_step_has_made_anew_are_copied_each_by_itself() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = Growing([weight], lr=0.1)
    backup = OptimizerBackup(optimizer)
    for size in range(MANY):
        backup.save()
        optimizer.step()
        assert optimizer.state[weight]["history"].tolist() == [1.0] * (size + 1)
    optimizer.state[weight]["history"].fill_(2)
    backup.restore()
    assert optimizer.state[weight]["history"].tolist() == [1.0] * (MANY - 1)


def numbers() -> Iterator[Tensor]:
    value = torch.zeros(2)
    while True:
        yield value
        del value
        value = torch.zeros(2)


def test_a_generator_whose_values_take_one_another_s_place_has_gone_on() -> None:
    own = numbers()
    next(own)
    walk = Walk([("drawn", own)], 0)
    assert walk.lost() == []
    for _ in range(MANY):
        next(own)
        assert walk.lost() == ["drawn"]
