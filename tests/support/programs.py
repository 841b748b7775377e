"""Stages under programs of segments: forwards counted, gradients, and the peak beside the predicted one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from layouts import make_engine, part_of, uniform
from torch import Tensor, nn

from runner.engine.memory_meter import MemoryMeter
from runner.engine.transport.base import Transport
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.values import ActivationPlan, ChainProgram, Program
from runner.model.layers import StageModule, build_stage, layers_of
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.predict import predict_memory
from runner.plan.stages.figures import stage_figures
from runner.profile import ModelProfile
from runner.profiling.model import profile_layers
from runner.schedule.catalogue.registry import build
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule

Batch = tuple[Tensor, Tensor]


class Counted(nn.Module):
    """A layer that notes each of its forwards."""

    def __init__(self, number: int, calls: Counter[int]) -> None:
        super().__init__()
        self.number, self.calls, self.linear = number, calls, nn.Linear(3, 3)

    def forward(self, value: Tensor) -> Tensor:
        self.calls[self.number] += 1
        made: Tensor = self.linear(value).tanh()
        return made


def count_forwards(num_layers: int, program: ChainProgram) -> Counter[int]:
    """How often each layer of a stage runs in one forward and backward."""
    calls: Counter[int] = Counter()
    sources = layers_of(nn.Sequential(*(Counted(number, calls) for number in range(num_layers))), 0)
    stage = build_stage(sources, 0, num_layers - 1)
    install(stage, program)
    stage(torch.ones(2, 3)).sum().backward()
    return calls


def chains(plan: ActivationPlan) -> tuple[ChainProgram, ...]:
    """The programs of a plan that has chain programs alone."""
    found = tuple(program for program in plan.stages if isinstance(program, tuple))
    assert len(found) == len(plan.stages)
    return found


def make_blocks(count: int = 10, width: int = 48, dropout: float = 0.1) -> nn.Sequential:
    """Layers of equal shape that save several tensors each."""
    torch.manual_seed(0)
    block = partial(nn.Linear, width, width)
    return nn.Sequential(
        *(nn.Sequential(block(), nn.Tanh(), nn.Dropout(dropout), block(), nn.GELU()) for _ in range(count))
    )


def points(samples: int = 1024, width: int = 48) -> Batch:
    """Inputs and targets of :func:`make_blocks`."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(samples, width, generator=generator), torch.randn(samples, width, generator=generator)


@dataclass(frozen=True)
class Trained:
    """What two steps of AdamW under programs did; lists are by rank.

    Attributes:
        peaks: the most bytes of live tensors, as a meter counted them.
        predicted: the plan's.
        weights: weights and buffers at the end, by global name.
    """

    peaks: list[int]
    predicted: tuple[int, ...]
    losses: list[list[float]]
    weights: dict[str, Tensor]


def measured_and_predicted(*given: Any, **options: Any) -> tuple[list[int], tuple[int, ...]]:
    """The peak bytes of :func:`train_under`: those of a run, and the plan's."""
    trained = train_under(*given, **options)
    return trained.peaks, trained.predicted


def train_under(
    make: Callable[[], nn.Module],
    loss: Callable[..., Any],
    batch: Batch,
    programs: Sequence[Program],
    schedule: str | Schedule,
    count: int = 4,
    *,
    to_host: bool = False,
    messages: Callable[[Transport], Transport] = lambda transport: transport,
    profile: ModelProfile | None = None,
) -> Trained:
    """Train a pipeline with AdamW, with a program for each stage.

    With ``to_host``, hooks send what is saved to the host, whose memory is the device's here; ``messages`` makes the
    transport of which a rank's engine knows; ``profile`` is that of the model, which is made where it is not given.
    """
    samples = len(batch[0])
    order = build(schedule, ranks=len(programs), microbatches=count) if isinstance(schedule, str) else schedule
    sources = layers_of(make(), 0)
    partition = uniform(len(sources), order.stages)
    inputs, targets = (value[: -(-samples // count)] for value in batch)
    profile = profile or profile_layers(sources, inputs, targets, loss, torch.float32)
    profile = replace(profile, optimizer_bytes_per_gradient_byte=2.0)
    plan = ActivationPlan(tuple(programs), to_host, host_apart=False)
    figures = stage_figures(adjusted(profile, plan), partition)
    predicted = predict_memory(lower(order), profile, figures, MemoryNeeds(samples)).peak_bytes
    models = [make() for _ in range(order.ranks)]

    def prepare(stage: StageModule, number: int) -> None:
        install(stage, programs[number], to_host=to_host)

    def run(transport: ThreadTransport) -> tuple[int, list[float], dict[str, Tensor]]:
        engine = make_engine(
            models[transport.rank], loss, messages(transport), schedule=order, pipeline=order.ranks, data=1,
            count=count, optimizer=partial(torch.optim.AdamW, foreach=False), prepare=prepare,
        )  # fmt: skip
        meter, losses = MemoryMeter(engine), []
        for _ in range(2):
            own = part_of(batch, transport, order.ranks, 1, order)
            with meter.step(own):
                losses += [step.loss for step in engine.submit(own)]
        engine.drain()
        return (
            meter.peak_bytes,
            losses,
            {k: v for each in engine.stages.values() for k, v in each.global_state().items()},
        )

    found = run_ranks(order.ranks, run)
    weights = {name: value for _, _, state in found for name, value in state.items()}
    return Trained([peak for peak, _, _ in found], predicted, [losses for _, losses, _ in found], weights)
