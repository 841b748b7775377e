"""A delayed update is the explicit recursion, bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from narrow import gradient

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


@pytest.mark.parametrize(("name", "first"), [("adamw", 0), ("momentum", 2)])
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


@pytest.mark.parametrize(("name", "stop"), [("adamw", 1), ("adamw", 2), ("momentum", 5)])
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
