"""The plain loop under an asynchronous schedule: gradients are taken at weights that lack some optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan
from runner.schedule.values import Schedule
from runner.training.run_plan import planned

__all__ = ["ReferenceVersions"]


class ReferenceVersions:
    """The weights of one process's model by optimizer step, as far back as the schedule reads them.

    Args:
        config: names the schedule; a flushed one reads the newest weights alone.
        run_dir: holds the layer profile that stages were cut by.
        model: all layers.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model: StageModule) -> None:
        self._stage: dict[Parameter, int] = {}
        self._kept: dict[Parameter, list[Tensor]] = {}
        self._steps = 0
        self._schedule: Schedule | None = None
        if is_chosen_by_plan(config) or not executed_schedule(config).is_asynchronous:
            return
        plan = planned(config, run_dir)
        self._schedule = plan.schedule
        for stage, (first, last) in enumerate(plan.partition):
            for layer in model.layers_between(first, last):
                self._stage |= dict.fromkeys((each for each in layer.parameters() if each.requires_grad), stage)
        self._remember()

    @contextmanager
    def read(self, number: int) -> Iterator[Callable[[], None]]:
        """Within it, the model has the weights that the forward of this step's micro-batch ``number`` reads.

        Yields:
            a function to call between the forward and the backward: afterwards, the model has the weights that the
            backward reads.
        """
        newest = {parameter: parameter.data for parameter in self._stage}
        schedule = self._schedule
        for parameter, stage in self._stage.items():
            assert schedule is not None  # without one, no parameter has a stage
            index = self._steps * schedule.window_size + number
            values = self._kept[parameter][schedule.version_read(stage, index) - self._steps - 1]
            parameter.data = values.clone() if schedule.reads_newest else values

        @torch.no_grad()
        def before_backward() -> None:
            if schedule is not None and schedule.reads_newest:
                for parameter, values in newest.items():
                    parameter.data.copy_(values)  # autograd keeps the memory, and does not see that it changes

        try:
            yield before_backward
        finally:
            for parameter, values in newest.items():
                parameter.data = values

    def stepped(self) -> None:
        """Keep the weights that an optimizer step has made."""
        self._steps += 1
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        for parameter, stage in self._stage.items():
            assert self._schedule is not None
            versions = self._kept.setdefault(parameter, [])
            versions.append(parameter.detach().clone())
            del versions[: -1 - self._schedule.lags[stage]]
