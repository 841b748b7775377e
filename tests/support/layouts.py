"""Run the engine in one process, a thread per rank, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from runner.engine.engine import Engine, EngineOptions
from runner.engine.executor import RankView
from runner.engine.transport import Transport
from runner.engine.transport_threads import ThreadTransport, run_ranks
from runner.engine.window import StepBatch
from runner.model.layers import build_stage, layers_of
from runner.optim.master import MasterWeights
from runner.plan.batches import split_sizes
from runner.schedule.generators.forward_only import forward_only
from runner.schedule.lower import lower
from runner.schedule.registry import build


def uniform(layers: int, stages: int) -> list[tuple[int, int]]:
    ends, start = [], 0
    for size in split_sizes(layers, stages):
        ends.append((start, start + size - 1))
        start += size
    return ends


def make_engine(
    model: nn.Module,
    loss: Callable,
    transport: Transport,
    *,
    schedule: str,
    pipeline: int,
    data: int,
    count: int,
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    masters: bool = False,
    **options: object,
) -> Engine:
    """The engine of one rank; rank = position * data + replica."""
    position, replica = divmod(transport.rank, data)
    sources = layers_of(model, 0)
    first, last = uniform(len(sources), pipeline)[position]
    stage = build_stage(sources, first, last).to(dtype)
    order = build(schedule, ranks=pipeline, microbatches=count)
    engine = Engine(
        view=RankView(
            position=position,
            pipeline=tuple(p * data + replica for p in range(pipeline)),
            replicas=tuple(position * data + d for d in range(data)),
            num_stages=pipeline,
            first_microbatch=replica * count,
        ),
        training=lower(order),
        forward_only=lower(forward_only(order, count)),
        stages={position: stage},
        loss=loss,
        transport=transport,
        options=EngineOptions(microbatches=count, dtype=dtype, **options),  # type: ignore[arg-type]
    )
    parameters = list(stage.parameters())
    if not parameters:
        engine.attach_optimizer(lambda: None, master_of=(lambda weight: weight) if masters else None)
    elif masters:
        wrapped = MasterWeights(parameters, optimizer)
        engine.attach_optimizer(wrapped.step, master_of=wrapped.master_of)
    else:
        engine.attach_optimizer(optimizer(parameters).step)
    return engine


def part_of(batch: tuple[Tensor, Tensor], transport: Transport, pipeline: int, data: int) -> StepBatch:
    """What a rank loads: its replica's samples, and only at the ends of the pipeline."""
    position, replica = divmod(transport.rank, data)
    inputs, targets = (tensor.tensor_split(data)[replica] for tensor in batch)
    return StepBatch(
        inputs=inputs if position == 0 else None,
        targets=targets if position == pipeline - 1 else None,
        samples=len(inputs) if position in (0, pipeline - 1) else None,
    )


def train_in_threads(
    make_model: Callable[[], nn.Module],
    loss: Callable,
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    pipeline: int,
    data: int,
    **options: object,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and the weights by global name."""
    models = [make_model() for _ in range(pipeline * data)]  # here, because threads share the random generator

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor]]:
        engine = make_engine(models[transport.rank], loss, transport, pipeline=pipeline, data=data, **options)  # type: ignore[arg-type]
        losses = []
        for batch in batches:
            losses += [step.loss for step in engine.submit(part_of(batch, transport, pipeline, data))]
        engine.drain()
        return losses, {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}

    results = run_ranks(pipeline * data, run)
    weights: dict[str, Tensor] = {}
    for _, state in results:
        weights.update(state)
    return [losses for losses, _ in results], weights
