"""A delayed update is the explicit recursion, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from narrow import gradient
from user_project import plain_result
from zero_ranks import train_all

from runner.optim.states.delayed import DelayedUpdate


class Explicitly:
    """``w[i+1] = w[i] - update(g[i-1])`` from step ``first`` on; nothing is updated at that step."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
        first: int,
    ) -> None:
        self.parameters = list(parameters)
        self.optimizer = make(self.parameters)
        self.first, self.number = first, 0
        self.kept: list[torch.Tensor] | None = None

    def step(self) -> None:
        now = [gradient(parameter).clone() for parameter in self.parameters]
        used = now if self.number < self.first else self.kept
        if used is not None:
            for parameter, value in zip(self.parameters, used, strict=True):
                parameter.grad = value
            self.optimizer.step()
        self.kept = now if self.number >= self.first else None
        self.number += 1


MAKERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_the_wrapper_is_the_recursion(name: str, first: int) -> None:
    results = []
    for wrap in (
        lambda parameters: Explicitly(parameters, MAKERS[name], first),
        lambda parameters: DelayedUpdate(list(parameters), MAKERS[name], first=first),
    ):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        optimizer, seen = wrap(model.parameters()), []
        for step in range(7):
            model.zero_grad()
            model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
            optimizer.step()
            seen += [parameter.detach().clone() for parameter in model.parameters()]
        results.append(seen)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("stop", [1, 2, 5])
@pytest.mark.parametrize("name", MAKERS)
def test_a_run_goes_on_from_the_states_with_the_update_that_was_under_way(name: str, stop: int) -> None:
    def train(model: torch.nn.Module, optimizer: DelayedUpdate, steps: range) -> None:
        for step in steps:
            model.zero_grad()
            model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
            optimizer.step()
        optimizer.settle()

    def made() -> tuple[torch.nn.Module, DelayedUpdate]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        return model, DelayedUpdate(list(model.parameters()), MAKERS[name], first=2)

    (whole, whole_optimizer), (first, first_optimizer), (second, second_optimizer) = made(), made(), made()
    train(whole, whole_optimizer, range(8))
    train(first, first_optimizer, range(stop))
    second.load_state_dict(first.state_dict())
    for parameter, saved in zip(second.parameters(), first.parameters(), strict=True):
        second_optimizer.state[parameter] = copy.deepcopy(first_optimizer.state[saved])
    train(second, second_optimizer, range(stop, 8))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.full
def test_under_zero_it_is_the_recursion(tmp_path: Path) -> None:
    runs = {
        f"delayed_{stage}": [
            "parallelism.data=2", f"zero.stage={stage}", "offload.optimizer=cpu", "offload.delay_from=1",
            "trainer.max_steps=4", "data.kwargs.samples=24",
        ]
        for stage in (1, 3)
    }  # fmt: skip
    found = train_all(tmp_path, runs)
    losses, state = plain_result(
        replicas=2,
        by_replica=True,
        optimizer=lambda parameters: Explicitly(
            parameters, lambda group: torch.optim.AdamW(group, lr=1e-3, weight_decay=0.0), 1
        ),
    )
    for result in found.values():
        assert result.loss == losses
        assert [name for name in state if not torch.equal(result.weights[name], state[name])] == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_under_zero_a_run_goes_on_with_the_update_that_was_under_way(tmp_path: Path) -> None:
    common = ("parallelism.data=2", "offload.optimizer=cpu", "offload.delay_from=1", "data.kwargs.samples=24")
    runs = {
        f"{name}_{stage}": [*common, f"zero.stage={stage}", f"trainer.max_steps={steps}"]
        for stage in (1, 3)
        for name, steps in (("whole", 4), ("first", 2))
    }
    whole = train_all(tmp_path, runs)
    resumed = {
        f"second_{stage}": [*runs[f"whole_{stage}"], f"resume={tmp_path}/first_{stage}/checkpoints/step-2.ckpt"]
        for stage in (1, 3)
    }
    for name, result in train_all(tmp_path, resumed).items():
        expected = whole[name.replace("second", "whole")]
        assert result.loss == expected.loss
        assert [key for key, value in expected.weights.items() if not torch.equal(value, result.weights[key])] == []
