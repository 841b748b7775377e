"""A delayed update is the explicit recursion, bit by bit."""

from __future__ import annotations

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
