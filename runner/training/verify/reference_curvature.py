"""K-FAC in the plain loop, for schedules that say when curvature is summed and inverted.

It uses the factors of the same step, and inverses as old as in the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.engine.actions.curvature import ScheduledCurvature
from runner.engine.measure.timeline import Timeline
from runner.model.device import device_memory_bytes
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.optim.kinds.kfac import KFAC
from runner.plan.make import make_plan
from runner.plan.values import RunPlan
from runner.profile import read_profile
from runner.schedule.values import Op
from runner.strategy.curvature import layers_of_stages, preconditioning, watch_curvature

__all__ = ["ReferenceCurvature"]


class ReferenceCurvature:
    """The work that the plain loop does for K-FAC; nothing for another optimizer.

    Args:
        config: the request.
        run_dir: holds the profile from which its schedule is made.
        optimizer: any.
        model: all layers.
        ties: of the model.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, optimizer: Optimizer, model: StageModule, ties: Sequence[Tie]
    ) -> None:
        self._kfac: KFAC | None = preconditioning(optimizer)
        self._curvature: ScheduledCurvature | None = None
        self._plan: RunPlan | None = None
        self._window = 0
        if self._kfac is None:
            return
        tied = {tie.name for tie in ties}
        self._plan = plan = make_plan(config, read_profile(run_dir), device_memory_bytes=device_memory_bytes(config))
        if plan.schedule.has_curvature:
            (layers,) = layers_of_stages({0: model}, tied).values()
            cuts = {stage: model.layers[first : last + 1] for stage, (first, last) in enumerate(plan.partition)}
            held = {stage: {id(each) for part in cut for each in part.modules()} for stage, cut in cuts.items()}
            self._curvature = ScheduledCurvature(
                self._kfac, {stage: [each for each in layers if id(each) in own] for stage, own in held.items()}
            )
        else:
            watch_curvature(optimizer, {0: model}, tied)

    def begin(self, step: int) -> None:
        """Prepare for a step."""
        if self._curvature is not None and self._plan is not None:
            self._window = step % self._plan.schedule.windows
            self._curvature.begin(self._window)
        elif self._kfac is not None:
            self._kfac.begin()

    def seeing(self, microbatch: int) -> AbstractContextManager[object]:
        """The context in which the forward of a micro-batch runs."""
        return nullcontext() if self._curvature is None else self._curvature.seeing(0, microbatch)

    def end(self) -> None:
        """Complete the sums, and do the inversions that the schedule has in this step; call it before the update."""
        if self._curvature is None or self._plan is None:
            return
        self._curvature.settle()
        for row in self._plan.schedule.actions:
            for action in row:
                if action.op in (Op.INV_A, Op.INV_B) and action.window == self._window:
                    self._curvature.do(action, Timeline())
