"""The place of a rank in its pipeline, and the objects that the parts of its executor share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from runner.engine.buffers import Buffers
from runner.engine.measure.timeline import Timeline
from runner.engine.transport.base import Transport
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.update.sharding import Sharding
from runner.engine.window import Window
from runner.model.layers import StageModule
from runner.plan.layout.topology import Topology
from runner.schedule.values import Action, Op, Schedule

__all__ = ["RankContext", "RankView", "number_of"]


@dataclass(frozen=True)
class RankView:
    """The place of a rank in its pipeline and among its replicas.

    Args:
        position: its position in its pipeline.
        pipeline: the global rank at each position of this rank's pipeline.
        replicas: the global ranks that hold the same stages at the same position, in replica order.
        shards: the global ranks that divide this rank's layers with it, in their order; this one alone if none does.
        peers: the global ranks at this position of all pipelines: the replicas of all shards.
        judges: the global ranks of this replica, of all positions and shards, which share a verdict.
        num_stages: number of stages of the model.
        first_microbatch: the global number of this replica's first micro-batch: d * T.
        holders: for each of this rank's stages, all global ranks with a copy: replicas, and the twins of pipelines
            that cross. Their gradients are summed, in this order.
        later_copies: this rank's stages whose first copy is on another rank of its pipeline; the consequences for each
            parameter are in its tag, see :class:`runner.model.tags.ParameterTag`.
    """

    position: int
    pipeline: tuple[int, ...]
    replicas: tuple[int, ...]
    shards: tuple[int, ...]
    peers: tuple[int, ...]
    judges: tuple[int, ...]
    num_stages: int
    first_microbatch: int
    holders: Mapping[int, tuple[int, ...]]
    later_copies: frozenset[int] = frozenset()

    @classmethod
    def of(cls, topology: Topology, rank: int, *, microbatches: int) -> Self:
        """The view of ``rank`` in a topology; ``microbatches`` is the number of one replica's micro-batches."""
        place, stages = topology.coordinates(rank), topology.stages_of(rank)
        return cls(
            position=place.pipe,
            pipeline=topology.pipeline_group(place.data, place.tensor),
            replicas=topology.data_group(place.pipe, place.tensor),
            shards=topology.tensor_group(place.pipe, place.data),
            peers=topology.peers(place.pipe),
            judges=topology.model_group(place.data),
            num_stages=topology.num_stages,
            first_microbatch=place.data * microbatches,
            holders={stage: topology.holders(stage, place.tensor) for stage in stages},
            later_copies=frozenset(
                stage for stage in stages if topology.rank_of(stage, place.data, place.tensor, row=0) != rank
            ),
        )

    @property
    def is_first_shard(self) -> bool:
        """Whether this rank is the first one of those that divide its layers."""
        return not self.shards or self.shards[0] == self.pipeline[self.position]

    @property
    def has_twins(self) -> bool:
        """Whether several ranks of this rank's pipeline hold one of its stages."""
        return any(len(ranks) > len(self.replicas) for ranks in self.holders.values())


@dataclass
class RankContext:
    """The objects that compute and messages of one rank share.

    Args:
        view: the place of the rank.
        stages: its stage modules by stage.
        transport: sends and receives messages.
        microbatches: number of micro-batches of a window.
        schedules: the schedules of a training window (True) and of a validation window (False), which tell on which
            rank each micro-batch finds its stages.
        buffers: tensors that wait for their use.
        sharding: keeps the gradients of the rank's stage, if the engine does not.
        tensor_group: what this rank exchanges with those that divide its layers with it; None: none does.
        timeline: the times of what the rank did.
        speed: how fast the rank computes, in parts of its real speed, for experiments.
        windows: the windows that have begun and not ended, by place; see :class:`runner.engine.stream.RankStream`.
    """

    view: RankView
    stages: Mapping[int, StageModule]
    transport: Transport
    schedules: Mapping[bool, Schedule]
    microbatches: int
    sharding: Sharding | None = None
    tensor_group: TensorGroup | None = None
    buffers: Buffers = field(default_factory=Buffers)
    timeline: Timeline = field(default_factory=Timeline)
    speed: float = 1.0
    windows: dict[int, Window] = field(default_factory=dict)

    def window_of(self, action: Action) -> Window:
        """The window to which ``action`` belongs; fills of a stage belong to none.

        Raises:
            KeyError: it has not begun, or has ended.
        """
        place = action.window if action.microbatch is None else action.microbatch // self.microbatches
        return self.windows[place]

    def computed(self, op: str, stage: int, microbatch: int, start: Any) -> None:
        """Note a compute action that began at ``start`` and ends now, or when a slower device would end it."""
        self.slow_down(start)
        self.timeline.compute(op, stage, microbatch, start)

    def slow_down(self, start: Any) -> None:
        """Sleep until what began at ``start`` has taken as long as at this rank's emulated speed."""
        if self.speed < 1:
            begin, end = self.timeline.clock.seconds([start, self.timeline.moment()])
            time.sleep((end - begin) * (1 / self.speed - 1))

    def holds(self, window: Window, stage: int, microbatch: int, op: Op = Op.F) -> bool:
        """Whether this rank runs ``op`` of ``stage`` and ``microbatch``; a window without backwards has only F."""
        schedule = self.schedules[window.training]
        if not 0 <= stage < schedule.stages:
            return False
        return schedule.rank_of(stage, window.index(microbatch), op) == self.view.position

    def recomputes_elsewhere(self, window: Window, stage: int) -> bool:
        """Whether the backward of a stage is not on the rank of its forward."""
        schedule = self.schedules[window.training]
        return 0 <= stage < schedule.stages and window.training and schedule.has_other_backward(stage)


def number_of(action: Action) -> int:
    """The number of the micro-batch of a compute action or message."""
    assert action.microbatch is not None
    return action.microbatch
