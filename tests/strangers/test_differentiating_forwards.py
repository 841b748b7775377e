"""Forwards that differentiate within: force fields and penalties ask for saved tensors before there is a backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layouts import make_engine, part_of
from requests_in_threads import SGD, in_plain_pytorch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.model.fake import fake_tensors
from runner.model.layers import layers_of
from runner.profiling.model import profile_layers

WIDTH, SAMPLES = 6, 8


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


class Force(Energy):
    """Adds the gradient of an energy by the input, in evaluation mode, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)
        return x + force


class Transformed(Energy):
    """The same by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.energy.named_parameters())
        made: Tensor = x + vmap(grad(lambda row: functional_call(self.energy, weights, (row,)).squeeze()))(x)
        return made


KINDS: dict[str, Callable[[], nn.Module]] = {"autograd.grad": Force, "torch.func": Transformed}


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, WIDTH), KINDS[kind](), nn.Tanh(), KINDS[kind](), nn.Linear(WIDTH, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 3, generator=generator)


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("kind", [*KINDS])
def test_they_are_profiled(kind: str, fake: bool) -> None:
    """Their row has all that autograd saves, of the inner graph, too."""
    inputs, targets = batch()
    if fake:
        with fake_tensors() as mode:
            inputs, targets = mode.from_tensor(inputs), mode.from_tensor(targets)
            profile = profile_layers(layers_of(model(kind), 0), inputs, targets, functional.mse_loss, torch.float32)
    else:
        profile = profile_layers(layers_of(model(kind), 0), inputs, targets, functional.mse_loss, torch.float32)
    row = profile.layers[1]
    assert row.saved_bytes > 2 * SAMPLES * WIDTH * 4
    assert row.recomputation[""].recomputed_bytes > 2 * SAMPLES * WIDTH * 4


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("kind", [*KINDS])
def test_they_train_in_two_stages_as_in_plain_pytorch(kind: str, schedule: str) -> None:
    expected = in_plain_pytorch(model(kind), functional.mse_loss, [batch()] * 3)
    models = [model(kind) for _ in range(2)]

    def run(transport: ThreadTransport) -> list[float]:
        engine = make_engine(
            models[transport.rank], functional.mse_loss, transport, schedule=schedule, pipeline=2, data=1, count=2,
            optimizer=SGD,
        )  # fmt: skip
        part = part_of(batch(), transport, 2, 1)
        return [step.loss for _ in range(3) for step in engine.submit(part)] + [step.loss for step in engine.drain()]

    assert run_ranks(2, run)[0] == pytest.approx(expected, rel=1e-5)
