"""The plain loop with an optimizer that sees the layers, and with the work that a schedule puts into bubbles.

It sees the micro-batches of the same step as in the layout, and its work is done at the end of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.engine.measure.timeline import Timeline
from runner.engine.work import Filler
from runner.engine.works.watch import LayerWatch, watch_of
from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.plan.values import RunPlan
from runner.schedule.values import Op, Schedule

__all__ = ["ReferenceFills"]


class ReferenceFills:
    """What the plain loop does for an optimizer that sees the layers; nothing for another one.

    Args:
        config: the request.
        run_dir: holds the profile from which its schedule is made.
        optimizer: any.
        model: all layers.
        ties: the ties of the model.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, optimizer: Optimizer, model: StageModule, ties: Sequence[Tie]
    ) -> None:
        self._watch: LayerWatch | None = watch_of(optimizer)
        self._filler: Filler | None = None
        self._schedule: Schedule | None = None
        self._window = 0
        if self._watch is None:
            return
        plan = RunPlan.load(run_dir)
        if plan.schedule.filling is not None:
            self._schedule = plan.schedule
            self._filler = self._watch.filler({0: model}, ties, plan.partition)
        else:
            self._watch.watch({0: model}, ties)

    def begin(self, step: int) -> None:
        """Prepare for a step."""
        if self._filler is not None and self._schedule is not None:
            self._window = step % self._schedule.windows
            self._filler.begin(self._window)
        elif self._watch is not None:
            self._watch.begin()

    def seeing(self, microbatch: int) -> AbstractContextManager[object]:
        """The context in which the forward of a micro-batch runs."""
        return nullcontext() if self._filler is None else self._filler.seeing(0, microbatch)

    def end(self) -> None:
        """Do the work of all micro-batches, and that of stages which the schedule has in this step; call it before the
        update."""
        if self._filler is None or self._schedule is None:
            return
        self._filler.settle()
        for row in self._schedule.actions:
            for action in row:
                if action.op is Op.FILL and action.microbatch is None and action.window == self._window:
                    self._filler.do(action, Timeline())
