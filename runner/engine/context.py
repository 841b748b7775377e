"""Where a rank stands in its pipeline, and what the parts of its executor share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runner.engine.buffers import Buffers
from runner.engine.sharding import Sharding
from runner.engine.timeline import Timeline
from runner.engine.transport import Transport
from runner.model.layers import StageModule
from runner.schedule.values import Action

__all__ = ["RankContext", "RankView", "number_of"]


@dataclass(frozen=True)
class RankView:
    """Where a rank stands.

    Args:
        position: in its pipeline.
        pipeline: global rank at each position of this rank's pipeline.
        replicas: global ranks that hold the same stages, in replica order.
        num_stages: stages of the model.
        first_microbatch: global number of this replica's first micro-batch: d * T.
    """

    position: int
    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    num_stages: int
    first_microbatch: int


@dataclass
class RankContext:
    """What compute and messages of one rank share.

    Args:
        view: where the rank stands.
        stages: its stage modules by stage.
        transport: how messages travel.
        buffers: tensors that wait for their use.
        sharding: keeps the gradients of the rank's stage, where the engine does not.
        timeline: what was done when.
    """

    view: RankView
    stages: Mapping[int, StageModule]
    transport: Transport
    sharding: Sharding | None = None
    buffers: Buffers = field(default_factory=Buffers)
    timeline: Timeline = field(default_factory=Timeline)


def number_of(action: Action) -> int:
    """The micro-batch of a compute action or message."""
    assert action.microbatch is not None
    return action.microbatch
