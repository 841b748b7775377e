"""Run the engine in one process, a thread per rank, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from runner.engine.engine import Engine, EngineOptions
from runner.engine.loss_scale import LossScaling
from runner.engine.rank_view import RankView
from runner.engine.transport.base import Transport
from runner.engine.transport.threads import ThreadTransport, run_ranks
from runner.engine.update.replicas import ReplicaExchange
from runner.engine.update.sharding import Sharding
from runner.engine.window import StepBatch, split_microbatches
from runner.engine.works.watch import watch_of
from runner.memory.apply.install import StageOffload
from runner.memory.apply.weight_swap import WeightSwap
from runner.model.boundary import map_tensors, num_samples
from runner.model.layers import LayerSource, StageModule, build_stage, layers_of
from runner.model.precision import cast_module
from runner.model.tags import tags_of
from runner.model.ties import find_ties
from runner.optim.forecast import Forecast
from runner.optim.learning_rate import scaled_rates
from runner.optim.states.backup import OptimizerBackup
from runner.optim.states.elastic import ElasticAverage
from runner.optim.states.master import MasterWeights
from runner.optim.states.shared import SharedStates
from runner.plan.layout.batches import split_sizes
from runner.plan.layout.topology import Topology
from runner.plan.prediction import Prediction
from runner.schedule.catalogue.registry import build
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule


class EngineFormat(TypedDict, total=False):
    """The options of :func:`make_engine` that make its precision."""

    dtype: torch.dtype
    masters: bool
    autocast: torch.dtype
    scaling: LossScaling


def step_once(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def own_master(weight: Tensor) -> nn.Parameter:
    """A weight as its own fp32 master, where a stage has no weight at all."""
    assert isinstance(weight, nn.Parameter)
    return weight


def uniform(layers: int, stages: int) -> list[tuple[int, int]]:
    ends, start = [], 0
    for size in split_sizes(layers, stages):
        ends.append((start, start + size - 1))
        start += size
    return ends


def make_engine(
    model: nn.Module | list[LayerSource],
    loss: Callable[..., Any],
    transport: Transport,
    *,
    schedule: str | Schedule,
    pipeline: int,
    data: int,
    count: int,
    optimizer: Callable[[Sequence[Tensor]], torch.optim.Optimizer],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    prepare: Callable[[StageModule, int], None] | None = None,
    masters: bool = False,
    shared: bool = False,
    sharding: Callable[[StageModule], Sharding] | None = None,
    prediction: Prediction | None = None,
    offload: StageOffload | None = None,
    swap: Callable[[Mapping[int, StageModule]], WeightSwap | None] | None = None,
    cut: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> Engine:
    """The engine of one rank; rank = position * data + replica.

    ``model`` may be a list of layers that were made already; ``schedule`` a name, or any schedule of its own;
    ``prepare`` is called with each stage's module and number; ``shared`` shares optimizer states out over replicas;
    ``sharding`` keeps the gradients of the rank's one stage;
    ``offload`` moves what stages save, on which ``prepare`` has installed it; ``swap`` takes weights of the stages home
    to the host's memory; ``cut`` has the first and last layer of
    each stage, by default equal numbers of them.
    """
    position = transport.rank // data
    order = schedule if isinstance(schedule, Schedule) else build(schedule, ranks=pipeline, microbatches=count)
    sources = model if isinstance(model, list) else layers_of(model, 0)
    cut = cut or uniform(len(sources), order.stages)
    with transport.exclusive():  # layers are seeded one by one, and the ranks share the generator
        stages = {stage: cast_module(build_stage(sources, *cut[stage]), dtype) for stage in order.stages_of(position)}
    if prepare is not None:
        for number, module in stages.items():
            prepare(module, number)
    ties = find_ties(sources)
    topology = Topology.grid(pipeline, data, placement=order.rows)
    view = RankView.of(topology, transport.rank, microbatches=count)
    holders = partial(topology.holders, shard=0)  # layers are whole
    tags = tags_of(stages, ties=ties, partition=cut, ranks_of_stage=holders, later_copies=view.later_copies)
    engine = Engine(
        view=view,
        training=lower(order),
        forward_only=lower(forward_only(order, count)),
        stages=stages,
        loss=loss,
        transport=transport,
        options=EngineOptions(microbatches=count, dtype=dtype, seed=seed, **options),
        tags=tags,
        sharding=sharding(*stages.values()) if sharding is not None else None,
        prediction=prediction,
        offload=offload,
        swap=swap(stages) if swap is not None else None,
    )
    parameters = list(dict.fromkeys(parameter for stage in stages.values() for parameter in stage.parameters()))
    if not parameters:
        engine.attach_optimizer(lambda: None, own_master if masters else None)
    elif masters:
        wrapped = MasterWeights(parameters, optimizer)
        engine.attach_optimizer(lambda: step_once(wrapped), wrapped.master_of, OptimizerBackup(wrapped))
    else:
        made = optimizer(parameters)
        if shared:
            engine.attach_optimizer(SharedStates(made, ReplicaExchange(transport, view.replicas)).step)
            return engine
        watch = watch_of(made)
        if order.filling is not None:
            engine.attach_optimizer(made.step, filler=watch.filler(stages, ties) if watch is not None else None)
            return engine
        if watch is not None:
            watch.watch(stages, ties)
        foresight = Forecast(prediction.kind, made) if prediction is not None else None

        def update() -> None:
            with scaled_rates(made, engine.rate_factor):
                made.step()

        begin = watch.begin if watch else None
        copies = made.copies if isinstance(made, ElasticAverage) else None
        backup = OptimizerBackup(made) if copies is None else None
        engine.attach_optimizer(update, backup=backup, begin=begin, foresight=foresight, copies=copies)
    return engine


def part_of(
    batch: tuple[Tensor, Tensor], transport: Transport, pipeline: int, data: int, schedule: str | Schedule = ""
) -> StepBatch:
    """What a rank loads: its replica's samples, and only where the first and the last stage are."""
    position, replica = divmod(transport.rank, data)
    samples = num_samples(batch[0])
    parts = (split_microbatches(value, split_sizes(samples, data))[replica] for value in batch)
    inputs, targets = (map_tensors(torch.clone, part) for part in parts)  # a rank loads its own: memory is aligned anew
    rows = schedule.rows if isinstance(schedule, Schedule) else (range(pipeline),)
    first, last = {row[0] for row in rows}, {row[-1] for row in rows}
    return StepBatch(
        inputs=inputs if position in first else None,
        targets=targets if position in last else None,
        samples=num_samples(inputs) if position in first | last else None,
    )


def train_in_threads(
    make_model: Callable[[], nn.Module],
    loss: Callable[..., Any],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    schedule: str | Schedule,
    pipeline: int,
    data: int,
    **options: Any,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses by rank, and the weights by global name."""
    models = [make_model() for _ in range(pipeline * data)]  # here, because threads share the random generator

    def run(transport: ThreadTransport) -> tuple[list[float], dict[str, Tensor]]:
        layout: dict[str, Any] = {"schedule": schedule, "pipeline": pipeline, "data": data}
        engine = make_engine(models[transport.rank], loss, transport, **layout, **options)
        losses = []
        for batch in batches:
            losses += [step.loss for step in engine.submit(part_of(batch, transport, pipeline, data, schedule))]
        engine.drain()
        return losses, {k: v for stage in engine.stages.values() for k, v in stage.global_state().items()}

    results = run_ranks(pipeline * data, run)
    weights: dict[str, Tensor] = {}
    for _, state in results:
        weights.update(state)
    return [losses for losses, _ in results], weights
