"""Makes the mover of a rank whose stages have saved tensors in the host's memory."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from runner.engine.options import EngineOptions
from runner.memory.apply.host_buffers import HostBuffers
from runner.memory.apply.host_lanes import Lane, SlowLink, make_lane
from runner.memory.apply.install import StageOffload
from runner.memory.apply.mover import Mover, Moving
from runner.memory.solve.program import moves_tensors
from runner.plan.values import RunPlan
from runner.strategy.protocols import Layout

__all__ = ["make_offload"]


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
    return StageOffload(Mover(device, HostBuffers(away, pinned=device.type == "cuda"), lanes, room, moving))


def _lane(options: EngineOptions, device: torch.device) -> Lane:
    return make_lane(device, SlowLink(options.offload_delay_seconds, options.offload_bytes_per_second))
