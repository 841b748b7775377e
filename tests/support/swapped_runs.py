"""Train under a plan whose weights are in the host's memory, in one process with a thread per rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from layouts import make_engine, part_of
from torch import Tensor

from runner.engine.memory_meter import MemoryMeter
from runner.engine.options import EngineOptions
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.memory.apply.install import install
from runner.memory.apply.weight_swap import WeightSwap
from runner.model.layers import LayerSource, StageModule
from runner.model.ties import find_ties
from runner.plan.values import RunPlan
from runner.strategy.offload import make_offload, swap_weights

STEPS = 2


def scalars(count: int) -> int:
    """The bytes of losses and weights of micro-batches, which predictions of tensors do not count."""
    return 64 + 20 * count


@dataclass
class Ran:
    """What a run did; lists are by rank.

    Args:
        moved: bytes of weights and of gradients that a rank moved.
        activations: bytes of activations that all ranks moved out and back.
        pooled: bytes of the host's buffers for gradients on their way.
    """

    losses: list[list[float]]
    weights: dict[str, Tensor]
    moved: list[tuple[int, int]]
    peak: list[int]
    pooled: list[int]
    plan: RunPlan
    activations: int = 0

    @property
    def planned(self) -> list[tuple[int, int]]:
        if not self.plan.turns:
            return [(0, 0)] * len(self.moved)
        return [(STEPS * each.traffic.weights, STEPS * each.traffic.gradients) for each in self.plan.turns]

    def assert_same(self, kept: Ran) -> None:
        """Losses of all steps and of a validation, and all weights and buffers, are the same bits."""
        assert self.losses == kept.losses
        assert self.weights.keys() == kept.weights.keys()
        assert [name for name in kept.weights if not torch.equal(kept.weights[name], self.weights[name])] == []


def train_swapped(
    plan: RunPlan,
    make: Callable[[], list[LayerSource]],
    loss: Callable[..., Any],
    batch: tuple[Tensor, Tensor],
    *,
    count: int,
    delay_seconds: float = 0.0,
) -> Ran:
    """Take :data:`STEPS` steps with AdamW, and validate, on the samples of one batch.

    Args:
        plan: the plan.
        make: makes the model's layers; called once for each rank, before there are ranks, because these are threads
            that share the random generators.
        loss: of output and target.
        batch: inputs and targets.
        count: number of micro-batches.
        delay_seconds: by which every move is later.
    """
    pipeline, data = plan.layout["pipeline"], plan.layout["data"]
    copies = [make() for _ in range(pipeline * data)]

    def one(transport: ThreadTransport) -> tuple[Any, ...]:
        options = EngineOptions(microbatches=count, offload_delay_seconds=delay_seconds)
        sources, adam = copies[transport.rank], partial(torch.optim.AdamW, lr=0.01, foreach=False)

        numbers, host = plan.schedule.stages_of(transport.rank // data), torch.device("cpu")
        offload = make_offload(plan, numbers, options, host, nullcontext)

        def swapped(stages: Mapping[int, StageModule]) -> WeightSwap | None:
            return swap_weights(plan, stages, find_ties(sources), options, host, nullcontext, offload)

        engine = make_engine(
            sources, loss, transport, schedule=plan.schedule, pipeline=pipeline, data=data, count=count,
            optimizer=lambda parameters: adam([each for each in parameters if each.requires_grad]),
            prepare=lambda stage, number: install(stage, plan.activations.stages[number], offload=offload),
            swap=swapped, offload=offload, cut=plan.partition,
        )  # fmt: skip
        meter, losses = MemoryMeter(engine), []
        for _ in range(STEPS):
            part = part_of(batch, transport, pipeline, data, plan.schedule)
            with meter.step(part):
                losses += [step.loss for step in engine.submit(part)]
            if engine.swap is not None:
                engine.swap.require_empty()
            if offload is not None:
                offload.mover.require_empty()
        engine.drain()
        sent = dict(engine.bytes_sent)
        moved = sent["host_weights"], sent["host_weight_gradients"]
        part = part_of(batch, transport, pipeline, data, plan.schedule)
        losses.append(engine.evaluate(part)[0])
        assert moved == (engine.bytes_sent["host_weights"], engine.bytes_sent["host_weight_gradients"])
        assert sent["host_activations"] == engine.bytes_sent["host_activations"]
        weights = {k: v.clone() for stage in engine.stages.values() for k, v in stage.global_state().items()}
        pooled = engine.swap.buffers.held if engine.swap is not None else 0
        return losses, weights, moved, meter.peak_bytes, pooled, sent["host_activations"]

    found = run_ranks(pipeline * data, one)
    weights = {name: value for each in found for name, value in each[1].items()}
    losses, _, moved, peaks, pooled, activations = (list(part) for part in zip(*found, strict=True))
    return Ran(losses, weights, moved, peaks, pooled, plan, sum(activations))


def largest_gradients(plan: RunPlan) -> Sequence[int]:
    """For each rank the gradients of its largest unit: what its host's buffers may hold at most."""
    stages = [plan.weights.of(plan.schedule.stages_of(rank)) for rank in range(plan.schedule.ranks)]
    return [max((unit.gradient_bytes for unit in units), default=0) for units in stages]
