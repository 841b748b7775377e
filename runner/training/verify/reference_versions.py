"""The plain loop under an asynchronous schedule or with predicted weights: gradients are taken at other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from runner.config.schema import RunConfig
from runner.model.layers import StageModule
from runner.optim.forecast import Forecast
from runner.optim.learning_rate import scaled_rates
from runner.plan.prediction import Prediction, predicts
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan
from runner.plan.values import RunPlan
from runner.schedule.gaps import StageGaps
from runner.schedule.values import Op, Schedule

__all__ = ["ReferenceVersions"]


class _Version(NamedTuple):
    """A weight after a number of optimizer steps, and the optimizer's state of it."""

    weight: Tensor
    state: dict[str, Any]


class ReferenceVersions:
    """The weights of one process's model by optimizer step, as far back as the schedule reads them.

    Args:
        config: names the schedule; a flushed one without predictions reads the newest weights alone.
        run_dir: holds the layer profile that stages were cut by.
        model: all layers.
        optimizer: updates them.
    """

    def __init__(self, config: RunConfig, run_dir: Path, model: StageModule, optimizer: Optimizer) -> None:
        self._stage: dict[Parameter, int] = {}
        self._kept: dict[Parameter, list[_Version]] = {}
        self._steps = 0
        self._schedule: Schedule | None = None
        self._prediction: Prediction | None = None
        self._optimizer = optimizer
        self._rates: dict[int, list[float]] = {}
        self._warmup = config.schedule.option("warmup_steps") or 0
        self._rescheduling = config.schedule.option("lr_rescheduling")
        if is_chosen_by_plan(config) and config.schedule.option("asynchronous") != "allowed":
            return
        order = RunPlan.load(run_dir).schedule if is_chosen_by_plan(config) else executed_schedule(config)
        if not order.is_asynchronous and not predicts(config, order.name):
            return
        plan = RunPlan.load(run_dir)
        self._schedule, self._prediction = plan.schedule, plan.prediction
        if plan.prediction is not None:
            self._forecast = Forecast(plan.prediction.kind, optimizer, self._rates.get)
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
        for parameter in self._stage:
            parameter.data = self._of_forward(parameter, number).clone()

        @torch.no_grad()
        def before_backward() -> None:
            for parameter in newest:
                values = self._of_backward(parameter, number)
                if values is not None:
                    parameter.data.copy_(values)  # autograd keeps the memory, and does not see that it changes

        try:
            yield before_backward
        finally:
            for parameter, values in newest.items():
                parameter.data = values

    def step(self) -> None:
        """Make the optimizer's step, stage by stage if their learning rates differ, and keep the new weights."""
        before = {parameter: parameter.detach().clone() for parameter in self._stage} if self._decays else {}
        for factor, parameters in self._by_rate().items():
            others = {each: each.grad for each in self._stage if each not in parameters}
            for parameter in others:
                parameter.grad = None
            with scaled_rates(self._optimizer, factor):
                self._optimizer.step()
            for parameter, gradient in others.items():
                parameter.grad = gradient
        for parameter, values in before.items():
            if self._gaps(parameter) is not None:
                self._forecast.learn(parameter, values, self._decays[self._stage[parameter]])

    def stepped(self) -> None:
        """Keep the weights that an optimizer step has made."""
        self._steps += 1
        self._remember()

    @property
    def _decays(self) -> tuple[float, ...]:
        return self._prediction.decays if self._prediction is not None else ()

    def _by_rate(self) -> dict[float, set[Parameter]]:
        """The factors of the learning rate, each with the parameters whose update it is for."""
        schedule, begun = self._schedule, self._steps - self._warmup
        if schedule is None or not schedule.is_asynchronous or not self._rescheduling or begun < 0:
            return {1.0: set(self._stage)}
        found: dict[float, set[Parameter]] = {}
        for parameter, stage in self._stage.items():
            late = schedule.lags[stage] / schedule.window_size
            factor = late ** (min(begun / self._rescheduling, 1.0) - 1.0) if late > 1 else 1.0
            found.setdefault(factor, set()).add(parameter)
        return found

    def _gaps(self, parameter: Parameter) -> StageGaps | None:
        return self._prediction.stages[self._stage[parameter]] if self._prediction is not None else None

    def _version_read(self, parameter: Parameter, number: int, op: Op = Op.F) -> int:
        """The version that ``op`` of a micro-batch of this step reads; the pipeline fills again after the warm-up."""
        schedule, stage = self._schedule, self._stage[parameter]
        assert schedule is not None  # without one, no parameter has a stage
        if not schedule.is_asynchronous:
            return self._steps
        index = self._steps * schedule.window_size + number
        version = max(0, (index - schedule.lags[stage]) // schedule.window_size)
        if schedule.reads_newest and op is Op.B:
            return self._steps
        return max(version, min(self._steps, self._warmup))

    def _of_forward(self, parameter: Parameter, number: int) -> Tensor:
        gaps = self._gaps(parameter)
        version = self._version_read(parameter, 0 if gaps is not None and gaps.once else number)
        if gaps is None:
            return self._at(parameter, version).weight
        return self._predicted(parameter, version, self._steps - version if gaps.forward is None else gaps.forward)

    def _of_backward(self, parameter: Parameter, number: int) -> Tensor | None:
        """The weight that a backward reads; None: the one of its forward."""
        gaps, schedule = self._gaps(parameter), self._schedule
        assert schedule is not None  # without one, no parameter has a stage
        if gaps is None:
            return self._at(parameter, self._steps).weight if schedule.reads_newest else None
        if gaps.backward is None:
            return None
        age = self._steps - self._version_read(parameter, number)
        return self._predicted(parameter, self._steps, -age if gaps.goes_back else gaps.backward)

    def _predicted(self, parameter: Parameter, version: int, gap: float) -> Tensor:
        kept = self._at(parameter, version)
        self._rates[self._steps] = [group["lr"] for group in self._optimizer.param_groups]
        found = self._forecast.predict(
            parameter, gap, newest=version, step=self._steps, weight=kept.weight, state=kept.state
        )
        return found.to(parameter.dtype)

    def _at(self, parameter: Parameter, version: int) -> _Version:
        return self._kept[parameter][version - self._steps - 1]

    @torch.no_grad()
    def _remember(self) -> None:
        for parameter, stage in self._stage.items():
            assert self._schedule is not None
            versions = self._kept.setdefault(parameter, [])
            versions.append(_Version(parameter.detach().clone(), self._state(parameter)))
            del versions[: -1 - (self._schedule.lags[stage] if self._schedule.is_asynchronous else 0)]

    def _state(self, parameter: Parameter) -> dict[str, Any]:
        """A copy of the optimizer's state of a weight; empty if nothing is predicted."""
        if self._prediction is None:
            return {}
        state = self._optimizer.state.get(parameter, {})
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
