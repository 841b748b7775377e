"""Every strategy in the engine: the bits of a run without, the memory that was predicted, one more forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from layouts import make_engine, part_of, train_in_threads, uniform
from plan_profiles import layer
from plan_profiles import model as profile_of
from programs import Batch, train_under
from torch import nn

from runner.engine.memory_meter import TRACKED_STEPS, MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.policies import solve
from runner.memory.solve.values import PolicyOptions, Segment
from runner.model.compiled import compile_layers
from runner.model.layers import layers_of
from runner.profiling.model import profile_layers
from runner.zoo import gpt
from runner.zoo.gpt import Gpt

COUNT = 3  # micro-batches
VOCABULARY, LENGTH = 61, 16
SCALARS = 64  # bytes of losses and totals, which no prediction counts


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make_gpt(dropout: float = 0.2, width: int = 16, blocks: int = 3) -> Gpt:
    torch.manual_seed(3)
    return gpt.build(VOCABULARY, LENGTH, width, blocks, 2, dropout)


def tokens(batch: int) -> Batch:
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randint, 0, VOCABULARY, (batch, LENGTH), generator=generator)
    return draw(), draw()


class Join(nn.Module):
    """Reads a dict in which memory of an earlier layer is carried past the layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, value: dict[str, Any]) -> Any:
        joined = value["left"] + value["right"][0] * value["right"][1]
        return self.head(joined.mean((2, 3)))


class Twice(nn.Module):
    def forward(self, value: torch.Tensor) -> dict[str, Any]:
        return {"left": value, "right": [value * 2, 3]}


def make_convolutions() -> nn.Sequential:
    """Batch norm, dropout, layers that work in place, and boundaries that are no tensors."""
    torch.manual_seed(4)
    block = partial(nn.Conv2d, kernel_size=3, padding=1)
    return nn.Sequential(
        nn.Sequential(block(3, 8), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        nn.Sequential(block(8, 8), nn.BatchNorm2d(8), nn.Dropout(0.3), nn.Tanh()),
        nn.ReLU(),
        nn.Sequential(block(8, 8), nn.BatchNorm2d(8, momentum=None)),
        Twice(),
        Join(),
    )


def pictures(batch: int) -> Batch:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.randint(0, 5, (batch,), generator=generator)


Case = tuple[Callable[..., nn.Module], Callable[..., Any], Callable[[int], Batch]]
"""A model, its loss, and a function that draws a batch of so many samples."""

CASES: dict[str, Case] = {
    "gpt": (make_gpt, token_loss, tokens),
    "convolutions": (make_convolutions, nn.functional.cross_entropy, pictures),
}
SAMPLES = 9


@pytest.mark.parametrize("preset", ["attention", "every_second_matmul"])
def test_kept_operators_change_no_bit_and_peaks_are_predicted(preset: str) -> None:
    batch, sources = tokens(SAMPLES), layers_of(make_gpt(), 0)
    inputs, targets = (each[: SAMPLES // COUNT] for each in batch)
    profile = profile_layers(sources, inputs, targets, token_loss, torch.float32)
    stages = uniform(len(sources), 2)
    kept = tuple((Segment(*stage),) for stage in stages)
    chosen = solve(profile, stages, PolicyOptions("selective", save_ops=preset)).stages
    found, plain = (
        train_under(make_gpt, token_loss, batch, programs, "1f1b", COUNT, profile=profile)
        for programs in (chosen, kept)
    )
    assert found.losses == plain.losses
    assert [name for name in plain.weights if not torch.equal(found.weights[name], plain.weights[name])] == []
    for real, said in zip(found.peaks, found.predicted, strict=True):
        assert real - SCALARS <= said <= 1.01 * real + SCALARS


def installer(model: Callable[..., Any], pipeline: int, options: PolicyOptions, *, to_host: bool = False) -> Any:
    sources = layers_of(model(), 0)
    rows = tuple(replace(layer(), name=source.name) for source in sources)
    plan = solve(profile_of(rows), uniform(len(sources), pipeline), options, to_host=to_host)
    return lambda stage, position: install(stage, plan.stages[position], to_host=plan.to_host)


def train(
    model: Callable[..., Any], loss: Callable[..., Any], batches: list[Batch], pipeline: int, prepare: Any = None
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    sgd = partial(torch.optim.SGD, lr=0.1)
    return train_in_threads(
        model, loss, batches, pipeline=pipeline, data=1, schedule="gpipe", count=COUNT, optimizer=sgd, prepare=prepare
    )


class Copies(torch.autograd.graph.saved_tensors_hooks):
    """Like torch's ``save_on_cpu`` on a GPU: autograd keeps copies, and the backward gets copies of these."""

    made = 0

    def __init__(self, pin_memory: bool = False) -> None:
        super().__init__(Copies.copy, Copies.copy)

    @staticmethod
    def copy(tensor: torch.Tensor) -> torch.Tensor:
        Copies.made += 1
        return tensor.detach().clone()


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("case", CASES)
def test_what_goes_to_the_host_gives_the_same_bits(case: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch moves nothing to the host; copies take the place of its moves there."""
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Copies)
    model, loss, draw = CASES[case]
    batches = [draw(SAMPLES)] * 2
    Copies.made = 0
    expected_losses, expected = train(model, loss, batches, 2)
    assert not Copies.made
    losses, state = train(model, loss, batches, 2, installer(model, 2, PolicyOptions(policy), to_host=True))
    assert losses == expected_losses
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    assert Copies.made > 0


class Count(nn.Module):
    """A layer that counts its forwards."""

    calls: Counter[int] = Counter()

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(6, 6)

    def forward(self, value: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            Count.calls[self.number] += 1
        return self.linear(value).tanh()


@pytest.mark.parametrize("policy", ["none", "full", "periodic", "manual"])
def test_one_more_forward_per_microbatch_of_a_recomputed_layer(policy: str) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Count(number) for number in range(4)))

    own: dict[str, dict[str, Any]] = {"periodic": {"every": 2}, "manual": {"layers": ("1", "3")}}
    options = PolicyOptions(policy, **own.get(policy, {}))
    batches = [(torch.randn(6, 6), torch.randn(6, 6))]
    Count.calls.clear()
    train(make, nn.functional.mse_loss, batches, 2, installer(make, 2, options))
    again = {"none": (), "full": range(4), "periodic": range(4), "manual": (1, 3)}[policy]
    assert Count.calls == {number: COUNT * (2 if number in again else 1) for number in range(4)}


def test_a_validation_gives_the_same_loss_under_a_policy() -> None:
    def run(transport: ThreadTransport, prepare: Any) -> Any:
        engine = make_engine(
            make_gpt(), token_loss, transport, schedule="1f1b", pipeline=1, data=1, count=COUNT,
            optimizer=partial(torch.optim.SGD, lr=0.1), prepare=prepare,
        )  # fmt: skip
        return engine.evaluate(part_of(tokens(7), transport, 1, 1))

    installed = installer(make_gpt, 1, PolicyOptions("full"), to_host=True)
    assert run_ranks(1, partial(run, prepare=installed)) == run_ranks(1, partial(run, prepare=None))


class Changing(nn.Module):
    """Reads a buffer that it also changes: a second forward must see what the first one saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.ones(4))

    def forward(self, value: torch.Tensor) -> Any:
        result = self.linear(value * self.seen.clone())
        self.seen.add_(result.detach().mean(0))
        return result.sin()


def test_a_buffer_that_a_forward_reads_and_changes_is_seen_as_it_was() -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(Changing(), Changing(), nn.Linear(4, 2))

    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(2)]
    expected = train(make, nn.functional.mse_loss, batches, 1)
    got = train(make, nn.functional.mse_loss, batches, 1, installer(make, 1, PolicyOptions("full")))
    assert got[0] == expected[0]
    assert all(torch.equal(got[1][name], expected[1][name]) for name in expected[1])


@pytest.mark.costly
def test_compiled_layers_are_equal_to_rounding_also_after_steps_whose_memory_is_measured() -> None:
    """What is measured runs a layer as it is, and the steps after that run it compiled."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.linear = nn.Linear(6, 6)

        def forward(self, value: torch.Tensor) -> Any:
            made = self.linear(value)
            return made.sin() * made

    drawn = torch.Generator().manual_seed(7)
    batch = torch.randn(6, 6, generator=drawn), torch.randn(6, 6, generator=drawn)

    def run(transport: ThreadTransport, compiled: bool) -> tuple[list[float], str]:
        engine = make_engine(
            nn.Sequential(Squared()), nn.functional.mse_loss, transport, schedule="1f1b", pipeline=1, data=1, count=1,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            prepare=lambda stage, position: compile_layers(stage) if compiled else None,
        )  # fmt: skip
        engine.options = replace(engine.options, compile=compiled)
        meter, part, losses = MemoryMeter(engine), part_of(batch, transport, 1, 1), []
        for _ in range(TRACKED_STEPS + 1):
            with meter.step(part):
                losses += [step.loss for step in engine.submit(part)]
        engine.drain()
        return losses, engine.stages[0](part.inputs, None).grad_fn.name()

    (plain, _), (losses, name) = (run_ranks(1, partial(run, compiled=compiled))[0] for compiled in (False, True))
    assert losses == pytest.approx(plain, rel=1e-5)
    assert "Compiled" in name
