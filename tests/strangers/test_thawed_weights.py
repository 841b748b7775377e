"""Weights that are frozen or thawed while a run goes on, by a hook or a forward."""

from __future__ import annotations

import pytest
import torch
from layouts import make_engine, part_of
from requests_in_threads import SGD
from torch import Tensor, nn
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks

STEPS, CHANGE = 4, 2


class Resting(nn.Module):
    """A layer whose weights are trained, or are not, from some forward on."""

    def __init__(self, *, thaws: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).requires_grad_(not thaws)
        self.thaws, self.changes = thaws, False

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.linear.requires_grad_(self.thaws)
        made: Tensor = torch.tanh(self.linear(x))
        return made


def model(*, thaws: bool) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), Resting(thaws=thaws), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def in_stages(stages: int, *, thaws: bool) -> list[float]:
    models = [model(thaws=thaws) for _ in range(stages)]

    def run(transport: ThreadTransport) -> list[float]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule="1f1b", pipeline=stages, data=1, count=2,
            optimizer=lambda own: SGD([weight for weight in own if weight.requires_grad]),
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            resting = models[transport.rank][1]
            assert isinstance(resting, Resting)
            resting.changes = step >= CHANGE
            losses += [done.loss for done in engine.submit(part_of(batch(), transport, stages, 1))]
        return losses

    return run_ranks(stages, run)[0]


@pytest.mark.parametrize("stages", [1, 2])
def test_what_is_frozen_later_rests(stages: int) -> None:
    whole = model(thaws=False)
    optimizer, expected, resting = SGD(whole.parameters()), [], whole[1]
    assert isinstance(resting, Resting)
    for step in range(STEPS):
        resting.changes = step >= CHANGE
        optimizer.zero_grad()
        loss = functional.mse_loss(whole(batch()[0]), batch()[1])
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()
        expected.append(loss.item())
    assert in_stages(stages, thaws=False) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_thaws_ends_the_run(stages: int) -> None:
    """Its gradient would be in no sum, would not be divided, and would stay from step to step."""
    with pytest.raises(Exception, match=r"1\.linear\.weight: must stay frozen in a run that began with it frozen"):
        in_stages(stages, thaws=True)
