"""The plain loop under an asynchronous schedule: gradients are taken at weights that lack some optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan
from runner.training.run_plan import planned

__all__ = ["ReferenceVersions"]


class ReferenceVersions:
    """The weights of one process's model by optimizer step, as far back as the schedule reads them.

    Args:
        config: names the schedule, whose delays count; flushed schedules have none.
        run_dir: holds the layer profile that stages were cut by.
        model: all layers.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model: StageModule) -> None:
        self._delay: dict[Parameter, int] = {}
        self._kept: dict[Parameter, list[Tensor]] = {}
        self._steps = 0
        if is_chosen_by_plan(config) or not executed_schedule(config).is_asynchronous:
            return
        plan = planned(config, run_dir)
        for (first, last), delay in zip(plan.partition, plan.schedule.delays, strict=True):
            for layer in model.layers_between(first, last):
                self._delay |= dict.fromkeys((each for each in layer.parameters() if each.requires_grad), delay)
        self._remember()

    @contextmanager
    def read(self) -> Iterator[None]:
        """Within it, the model has the weights that this step's forwards and backwards read."""
        newest = {parameter: parameter.data for parameter in self._delay}
        for parameter, versions in self._kept.items():
            parameter.data = versions[max(0, len(versions) - 1 - self._delay[parameter])]
        try:
            yield
        finally:
            for parameter, values in newest.items():
                parameter.data = values

    def stepped(self) -> None:
        """The optimizer step of these gradients has been taken."""
        self._remember()

    @torch.no_grad()
    def _remember(self) -> None:
        for parameter, delay in self._delay.items():
            versions = self._kept.setdefault(parameter, [])
            versions.append(parameter.detach().clone())
            del versions[: -(delay + 1)]
