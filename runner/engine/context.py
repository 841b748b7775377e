"""The objects that the parts of a rank's executor share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner.engine.buffers import Buffers
from runner.engine.measure.timeline import Timeline
from runner.engine.rank_view import RankView
from runner.engine.transport.base import Transport
from runner.engine.transport.tensor_group import TensorGroup
from runner.engine.update.sharding import Sharding
from runner.engine.window import Window
from runner.model.layers import StageModule
from runner.schedule.values import Action, Op, Schedule

__all__ = ["RankContext", "number_of"]


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
