"""Recurrent layers: their workspace, which fake tensors do not know, is predicted, and their products are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from covering import covering
from layouts import make_engine, part_of, uniform
from swapped_runs import scalars
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from runner.engine.memory_meter import MemoryMeter
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.policies import solve
from runner.memory.solve.values import PolicyOptions
from runner.model.fake import fake_tensors
from runner.model.layers import layers_of
from runner.model.live_tracker import LiveTracker
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profiling import real_sizes
from runner.profiling.flops import FlopCounter
from runner.profiling.model import profile_layers
from runner.profiling.real_sizes import RealSizes
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower

FEATURES, CLASSES = 8, 3


class Block(nn.Module):
    """A recurrent layer between ordinary ones."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rnn = layer

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.rnn(value)[0]
        return output


@dataclass(frozen=True)
class Asked:
    """A model and how it is trained.

    Args:
        kind: class of the recurrent layers; options: its keyword arguments.
        hidden, steps, samples: sizes.
        microbatches, stages: the layout.
        policy: the activation checkpoint.
    """

    kind: str
    hidden: int
    steps: int
    samples: int = 8
    microbatches: int = 1
    stages: int = 1
    policy: str = "none"
    options: tuple[tuple[str, object], ...] = ()

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        options = dict(self.options)
        make: Callable[..., nn.Module] = partial(getattr(nn, self.kind), batch_first=True, **options)
        size = options.get("proj_size", self.hidden)
        assert isinstance(size, int)
        width = size * (2 if options.get("bidirectional") else 1)
        return nn.Sequential(
            nn.Linear(FEATURES, self.hidden), Block(make(self.hidden, self.hidden)),
            Block(make(width, self.hidden)), nn.Linear(width, CLASSES),
        )  # fmt: skip

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = (self.samples, self.steps)
        inputs = torch.randn(*shape, FEATURES, generator=generator)
        return inputs, torch.randint(0, CLASSES, shape, generator=generator)


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def measured_and_predicted(asked: Asked) -> tuple[list[int], tuple[int, ...]]:
    """Peak bytes of each rank: counted in a run under AdamW, and predicted from fake tensors."""
    part = -(-asked.samples // asked.microbatches)
    with fake_tensors(), RealSizes():
        sources = layers_of(asked.model(), 0)
        inputs = torch.empty(part, asked.steps, FEATURES)
        targets = torch.empty(part, asked.steps, dtype=torch.int64)
        profile = profile_layers(sources, inputs, targets, token_loss, torch.float32)
    profile = replace(profile, optimizer_bytes_per_gradient_byte=2.0)
    partition = uniform(len(sources), asked.stages)
    plan = solve(profile, partition, PolicyOptions(asked.policy))
    order = build("1f1b", ranks=asked.stages, microbatches=asked.microbatches)
    figures = stage_figures(adjusted(profile, plan), partition)
    predicted = predict_memory(lower(order), profile, figures, MemoryNeeds(asked.samples, lingering=1)).peak_bytes
    models, batch = [asked.model() for _ in range(asked.stages)], asked.batch()

    def run(transport: ThreadTransport) -> int:
        engine = make_engine(
            models[transport.rank], token_loss, transport, schedule="1f1b", pipeline=asked.stages, data=1,
            count=asked.microbatches, optimizer=partial(torch.optim.AdamW, foreach=False),
            prepare=lambda stage, position: install(stage, plan.stages[position]),
        )  # fmt: skip
        meter = MemoryMeter(engine)
        for _ in range(2):
            own = part_of(batch, transport, asked.stages, 1)
            with meter.step(own):
                engine.submit(own)
        engine.drain()
        return meter.peak_bytes

    return run_ranks(asked.stages, run), predicted


SIZES = [
    Asked("LSTM", 16, 200, 1), Asked("LSTM", 33, 7, 13), Asked("LSTM", 128, 5, 64), Asked("GRU", 64, 4, 8),
    Asked("RNN", 48, 6, 5),
]  # fmt: skip
LAYOUTS = [
    pytest.param(Asked("LSTM", 40, 11, 8, *layout.values), marks=layout.marks)
    for layout in covering({"microbatches": [1, 2, 4], "stages": [1, 2], "policy": ["none", "full"]}, strength=2)
]
OPTIONS = [
    Asked("LSTM", 24, 5, 6, 2, options=options)
    for options in [
        (("num_layers", 3), ("dropout", 0.2)), (("proj_size", 3),),
        (("bidirectional", True), ("num_layers", 2)),
    ]
]  # fmt: skip


@pytest.mark.costly
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("asked", [*SIZES, *LAYOUTS, *OPTIONS], ids=str)
def test_the_counted_peak_is_the_predicted_one(asked: Asked) -> None:
    measured, predicted = measured_and_predicted(asked)
    for found, expected in zip(measured, predicted, strict=True):
        assert 0.99 * expected <= found <= expected + scalars(asked.microbatches)


@pytest.mark.parametrize("sizes", [(300, 64, 192, 192), (40, 200, 500, 700)], ids=str)
def test_the_workspace_of_a_long_sequence_is_extrapolated(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where measuring it takes too long: not below the true one, and at most a hundredth above."""
    steps, samples, features, hidden = sizes

    def found() -> int:
        real_sizes._workspace_bytes.cache_clear()
        with fake_tensors(), RealSizes():
            layer, value = nn.LSTM(features, hidden), torch.empty(steps, samples, features)
            with LiveTracker() as tracker:
                output = layer(value)
                assert output is not None
                return int(tracker.live)

    monkeypatch.setattr(real_sizes, "_MOST_FLOPS", 1e15)
    exact = found()
    monkeypatch.setattr(real_sizes, "_MOST_FLOPS", 1e9)
    assert exact <= found() <= 1.01 * exact


def unrolled(kind: str, steps: int, samples: int, features: int, hidden: int) -> float:
    """torch's count of the FLOPs of the same equations, written as a loop of linear layers."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    of_input, of_state = nn.Linear(features, gates * hidden), nn.Linear(hidden, gates * hidden)
    value = torch.randn(steps, samples, features, requires_grad=True)
    state = torch.randn(samples, hidden, requires_grad=True)
    cell, outputs = torch.zeros(samples, hidden), []
    with FlopCounterMode(display=False) as counter:
        for step in value:
            parts = (of_input(step).chunk(gates, -1), of_state(state).chunk(gates, -1))
            if kind == "LSTM":
                into, forget, new, out = (left + right for left, right in zip(*parts, strict=True))
                cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
                state = out.sigmoid() * cell.tanh()
            elif kind == "GRU":
                reset, update = (left + right for left, right in zip(parts[0][:2], parts[1][:2], strict=True))
                new = (parts[0][2] + reset.sigmoid() * parts[1][2]).tanh()
                state = (1 - update.sigmoid()) * new + update.sigmoid() * state
            else:
                state = (parts[0][0] + parts[1][0]).tanh()
            outputs.append(state)
        torch.stack(outputs).sum().backward()  # type: ignore[no-untyped-call]
    return float(counter.get_total_flops())


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("sizes", [(6, 4, 9, 17), (3, 8, 32, 16), (1, 2, 5, 5)], ids=str)
def test_flops_are_those_of_the_loop_of_its_equations(kind: str, sizes: tuple[int, int, int, int]) -> None:
    steps, samples, features, hidden = sizes
    layer: nn.Module = getattr(nn, kind)(features, hidden)
    value = torch.randn(steps, samples, features, requires_grad=True)
    state = torch.randn(1, samples, hidden, requires_grad=True)
    with FlopCounter() as counter:
        layer(value, (state, torch.zeros_like(state)) if kind == "LSTM" else state)[0].sum().backward()
    assert counter.total == unrolled(kind, *sizes)
