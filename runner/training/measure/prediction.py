"""The prediction to which a run is compared, made before its first step from stages measured with all ranks busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.config.schema import RunConfig
from runner.engine.engine import Engine
from runner.engine.measure.clocks import seconds_behind
from runner.engine.measure.probe import message_seconds, seconds_per_action, update_seconds, window_seconds
from runner.engine.measure.timeline import StepTimes, Timeline
from runner.engine.transport.base import Handle
from runner.engine.update.gradients import StageGradients
from runner.engine.update.update import Update
from runner.engine.window import StepBatch
from runner.engine.works.watch import watch_of
from runner.model.tags import named_parameters
from runner.optim.build import measure_step_seconds_per_byte, optimizer_of_run
from runner.optim.compression.rounds import GradientStep
from runner.optim.states.elastic import ElasticAverage
from runner.optim.states.master import MasterWeights
from runner.plan.averaging import averaging_of
from runner.plan.time.played import measured_time
from runner.plan.values import RunPlan, StageSeconds
from runner.strategy.pipeline import EngineStrategy
from runner.training.measure.measures import RankMeasures, bubble_ratio
from runner.training.measure.shared import store_of_ranks

__all__ = ["measured_plan"]

_FEWEST_WINDOWS, _MOST_WINDOWS = 4, 12
_MOST_SECONDS = 2.0
"""Of windows beyond the fewest: a machine's speed is not the same for a second on end, so that a few tell little."""
_MOST_BYTES_TO_COPY = 256 << 20
_LATE = 1 << 62
"""A step after all steps that are summed without compression."""


def measured_plan(strategy: EngineStrategy, config: RunConfig, batch: StepBatch, besides: float) -> RunPlan:
    """The strategy's plan with the time that its program takes here. Every rank must call it and gets the same.

    Forwards and backwards are rehearsed in the run's own schedule, so that ranks compete for the machine as they will
    during the run. Weights, buffers, gradients and random state are unchanged afterwards.

    Args:
        batch: this rank's part of a first batch.
        besides: this rank's seconds of a step before and after what the engine does.
    """
    engine = strategy.engine
    assert engine is not None
    plan = strategy.plan
    assert isinstance(plan, RunPlan)
    strategy.all_gather_objects(None)  # all are there, so that none waits for long in what follows
    engine.timeline.clock.behind = seconds_behind(store_of_ranks(), strategy.global_rank, plan.topology.world_size)
    measured = _rehearsed(strategy, engine, batch)
    crossing = max((row.output_bytes for row in plan.profile.layers), default=0)
    own: dict[str, Any] = {
        "stages": {
            stage: {
                **{op: seconds_per_action(measured, op, stage, plan.schedule.size_of) for op in "FBIW"},
                "step": _update_seconds(config, engine, stage) / engine.speed,
            }
            for stage in engine.stages
        },
        "window": window_seconds(measured),
        "besides": besides,
        "spans": [(times.first_compute, times.last_compute, times.compute) for times in measured.steps[1:]],
        "replica": strategy.replica,
        "message": message_seconds(engine.transport, strategy.view.pipeline, crossing),
        "reduce": {stage: _reduce_seconds(strategy, engine, stage) for stage in sorted(engine.stages)},
    }
    ranks = strategy.all_gather_objects(own)
    seconds = _combine(ranks, plan.schedule.stages)
    flows_on = config.schedule.post_validation
    time = measured_time(plan.program, plan.time.costs, seconds, post_validation=flows_on)
    time = replace(time, step_seconds=time.step_seconds + max(float(rank["besides"]) for rank in ranks))
    shape = plan.schedule
    flushed = not (flows_on or shape.is_asynchronous) and shape.windows == 1
    if plan.has_bubble and flushed and shape.filling is None:
        time = replace(time, bubble_ratio=_bubble(ranks, time.bubble_ratio))
    return replace(plan, time=time)


def _bubble(ranks: list[dict[str, Any]], played: float) -> float:
    """The bubble of the rehearsed windows, whose actions take other times each; a played one lacks these waits."""
    rows = [[StepTimes(-1, 0.0, 0.0, *span) for span in rank["spans"]] for rank in ranks]
    measures = [RankMeasures(tuple(row), {}, rank["replica"], 0, {}) for rank, row in zip(ranks, rows, strict=True)]
    found = bubble_ratio(measures, range(min(map(len, rows))))
    return played if found is None else found


def _rehearsed(strategy: EngineStrategy, engine: Engine, batch: StepBatch) -> Timeline:
    """The times of as many windows as fit into a while, after a few that have warmed everything up."""

    def again(measured: Timeline) -> int:
        longest = max(map(float, strategy.all_gather_objects(window_seconds(measured))))
        windows = min(_MOST_WINDOWS, int(_MOST_SECONDS / longest)) if longest > 0 else _MOST_WINDOWS
        return windows if windows > _FEWEST_WINDOWS else 0

    def any_rank(holds: bool) -> bool:
        return any(strategy.all_gather_objects(holds))

    return engine.rehearse(batch, _FEWEST_WINDOWS, again, any_rank)


def _combine(ranks: list[dict[str, Any]], num_stages: int) -> StageSeconds:
    """For each stage, the seconds of its slowest replica, because a step waits for it; 0 for absent operations."""
    stages = range(num_stages)

    def slowest(what: str) -> tuple[float, ...]:
        return tuple(
            max(float(rank["stages"][stage][what]) for rank in ranks if stage in rank["stages"]) for stage in stages
        )

    return StageSeconds(
        forward=slowest("F"),
        backward=slowest("B"),
        input_gradient=slowest("I"),
        weight_gradient=slowest("W"),
        step=slowest("step"),
        message=max(float(rank["message"]) for rank in ranks),
        window=max(float(rank["window"]) for rank in ranks),
        reduce=tuple(max(rank["reduce"][stage] for rank in ranks if stage in rank["reduce"]) for stage in stages),
    )


def _update_seconds(config: RunConfig, engine: Engine, stage: int) -> float:
    """Seconds to scale, clip, update and clear one stage, measured on a copy if the stage is small."""
    module = engine.stages[stage]
    own = named_parameters({stage: module})
    trained = [parameter for name, parameter in own.items() if engine.tags[name].is_trained]
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    averaging = averaging_of(config)
    if not trained:
        return 0.0
    if num_bytes > _MOST_BYTES_TO_COPY:
        dtype, device = engine.options.dtype, engine.transport.device
        per_byte = measure_step_seconds_per_byte(config, dtype, device)
        return per_byte * num_bytes * (averaging.pipes if averaging is not None else 1)
    copies = [torch.nn.Parameter(parameter.detach().clone()) for parameter in trained]
    optimizer = optimizer_of_run(config, copies, delayed=False)
    updated = copies
    if isinstance(optimizer, ElasticAverage):
        updated = [weight for weights in optimizer.copies.values() for weight in weights]
    gradients = StageGradients((str(number), copy) for number, copy in enumerate(updated))
    trainer = config.trainer
    update = Update(
        gradients=[gradients],
        pipeline=(0,),
        transport=engine.transport,
        clip_norm=trainer.grad_clip_norm,
        clip_value=trainer.grad_clip_value,
        scaling=None,
    )
    watch = watch_of(optimizer)
    if watch is not None:
        watch.rehearse(module, {id(parameter): copy for parameter, copy in zip(trained, copies, strict=True)})
    update.attach(optimizer.step, optimizer.master_of if isinstance(optimizer, MasterWeights) else None)

    def step() -> None:
        gradients.reach_all()
        update.open(1.0)
        update.apply(update.verdict().factor)
        update.close()

    besides = watch.seconds_besides(update_seconds) if watch is not None and engine.filler is None else 0.0
    return update_seconds(step) + besides


def _reduce_seconds(strategy: EngineStrategy, engine: Engine, stage: int) -> float:
    gradients = engine.gradients[stage]
    holders = gradients.holders
    if len(holders) <= 1:
        return 0.0
    if strategy.reducer is not None:
        fresh = strategy.reducer(gradients)  # one that has kept nothing, over gradients that are zero between steps
        gradients.of_step = GradientStep(index=_LATE)
        seconds = update_seconds(lambda: _wait(fresh.start(gradients, engine.transport, holders)))
        gradients.zero()
        return seconds

    def reduce() -> None:
        buffers: list[Tensor] = [torch.zeros_like(flat) for flat in gradients.flats]
        _wait([engine.transport.all_reduce(buffer, holders) for buffer in buffers])

    return update_seconds(reduce)


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
