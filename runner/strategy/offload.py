"""Makes what moves a rank's saved tensors and weights to the host's memory and back."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch.nn import Parameter

from runner.engine.options import EngineOptions
from runner.memory.apply.drive import DriveFolder
from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import Lane, SlowLink, make_lane
from runner.memory.apply.install import StageOffload, install_swap
from runner.memory.apply.mover import Mover, Moving
from runner.memory.apply.weight_swap import HostWeights, WeightSwap
from runner.memory.solve.program import moves_tensors
from runner.memory.solve.residency import ActionTurns, WeightUnit
from runner.memory.solve.weight_strategy import WeightPlan
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.plan.values import RunPlan
from runner.plan.weights import turns_of_ranks
from runner.schedule.generators.one_directional.forward_only import forward_only
from runner.strategy.protocols import Layout

__all__ = ["make_offload", "swap_weights"]


def make_offload(
    plan: Layout, stages: Iterable[int], options: EngineOptions, device: torch.device, moving: Moving
) -> StageOffload | None:
    """The mover of one rank, with buffers for all that it can have away at once by the plan; None if nothing is moved.

    Args:
        plan: the plan of the run.
        stages: the rank's stages.
        options: settings of the run; they may slow the moves down.
        device: the rank's device.
        moving: see :data:`runner.memory.apply.mover.Moving`.
    """
    own = list(stages)
    if not any(moves_tensors(plan.activations.stages[stage]) for stage in own):
        return None
    assert isinstance(plan, RunPlan)  # others move nothing
    away = sum(plan.in_flight[stage] * plan.figures[stage].moved_bytes for stage in own)
    room = max(plan.figures[stage].leaving_bytes for stage in own)
    lanes = (_lane(options, device), _lane(options, device))
    return StageOffload(Mover(device, _buffers(away, options, device), lanes, room, moving))


def _buffers(capacity: int, options: EngineOptions, device: torch.device) -> HostBuffers:
    """Buffers of the host's memory, or of a drive if the request names one."""
    if options.offload_drive is not None:
        return HostBuffers(capacity, make=DriveFolder(options.offload_drive).memory)
    return HostBuffers(capacity, pinned=device.type == "cuda")


def swap_weights(
    plan: Layout,
    stages: Mapping[int, StageModule],
    ties: Sequence[Tie],
    options: EngineOptions,
    device: torch.device,
    moving: Moving,
    offload: StageOffload | None = None,
) -> WeightSwap | None:
    """Take the weights of a rank home to the host's memory, and make what lends them; None if the plan moves none.

    Args:
        plan: the plan of the run.
        stages: the rank's stages, on their device.
        ties: weights with several names, which stay on the device.
        options, device, moving: see :func:`make_offload`.
        offload: what moves the rank's saved tensors; weights use the same lanes. None: nothing does.
    """
    if not isinstance(plan, RunPlan) or not plan.turns:
        return None
    position = next(rank for rank in range(plan.schedule.ranks) if set(plan.schedule.stages_of(rank)) == set(stages))
    tied = {name for tie in ties for _, name in tie.places}

    planned = sum(unit.weight_bytes for unit in plan.weights.of(plan.schedule.stages_of(position)))
    home = _buffers(planned, options, device).take
    numbers = plan.schedule.stages_of(position)
    units = [
        [
            HostWeights(_moving_weights(stages[stage], unit, tied, plan.weights), device, home)
            for unit in plan.weights.stages[stage]
        ]
        for stage in numbers
    ]
    lanes = offload.mover.lanes if offload is not None else (_lane(options, device), _lane(options, device))
    largest = max((unit.gradient_bytes for unit in plan.weights.of(numbers)), default=0)
    schedules = {True: plan.schedule, False: forward_only(plan.schedule, options.microbatches)}

    def turns(training: bool, microbatches: frozenset[int]) -> Sequence[ActionTurns]:
        listed = turns_of_ranks(plan.weights, plan.activations, schedules[training], plan.profile, microbatches)
        return listed[position].actions

    buffers = HostBuffers(largest, pinned=device.type == "cuda")
    swap = WeightSwap([each for own in units for each in own], lanes, turns, buffers, moving)
    for stage, own in zip(numbers, units, strict=True):
        program = plan.activations.stages[stage]
        assert isinstance(program, tuple)  # rules refuse other programs
        ends = [(unit.first, unit.last) for unit in plan.weights.stages[stage]]
        install_swap(stages[stage], program, swap, dict(zip(ends, own, strict=True)), offload)
    return swap


def _moving_weights(stage: StageModule, unit: WeightUnit, tied: Container[str], plan: WeightPlan) -> list[Parameter]:
    """The weights of a unit, without those that have several names."""
    own = {id(each) for layer in stage.layers_between(unit.first, unit.last) for each in layer.parameters()}
    return [
        parameter
        for name, parameter in stage.named_parameters()
        if id(parameter) in own and stage.global_name(name) not in tied
        if not (plan.frozen_only and parameter.requires_grad)
    ]


def _lane(options: EngineOptions, device: torch.device) -> Lane:
    return make_lane(device, SlowLink(options.offload_delay_seconds, options.offload_bytes_per_second))
