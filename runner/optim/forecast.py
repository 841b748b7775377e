"""Predicts weights from the states of their optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runner.optim.catalogue.drift import DRIFT_KEY
from runner.optim.catalogue.motion import LAST_GRADIENT, Motion
from runner.optim.catalogue.prediction import Moment, PredictionKind
from runner.optim.catalogue.registry import kind_of_class
from runner.optim.states.master import MASTER, MasterWeights

__all__ = ["Forecast"]

RatesOf = Callable[[int], Sequence[float] | None]
"""Returns the learning rate of each group of the optimizer at a step; None if it is not known."""


class Forecast:
    """Predicts the weights of one rank.

    Args:
        kind: the formula.
        optimizer: updates the weights; it may keep fp32 masters of them.
        rates_of: default: the rates that the optimizer has now.
    """

    def __init__(self, kind: PredictionKind, optimizer: Optimizer, rates_of: RatesOf | None = None) -> None:
        optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        self._kind, self._optimizer = kind, optimizer
        self._rates_of = rates_of or (lambda step: None)
        self._groups = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        inner = optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer
        self._motion = _motion_of(inner)
        if self._motion is not None and self._motion.needs_gradient and not kind.reads:
            inner.register_step_post_hook(_keep_gradients)

    @torch.no_grad()
    def predict(
        self,
        parameter: Tensor,
        gap: float,
        *,
        newest: int,
        step: int,
        weight: Tensor | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """The weight ``gap`` optimizer steps ahead; before its first step, the weight as it is.

        Args:
            parameter: the weight.
            gap: number of steps, below 0 for steps back.
            newest: the number of steps that have made the weight.
            step: the step for which it is predicted; its learning rate is used for all steps that are not known.
            weight, state: values and optimizer state to use instead of the present ones.

        Returns:
            the weight, in the master's format if there is one.
        """
        state = self._optimizer.state.get(parameter, {}) if state is None else state
        values: Tensor = state.get(MASTER, parameter.detach() if weight is None else weight)
        if not gap or self._kind.predict is None or not self._has_begun(state):
            return values
        group = self._groups[parameter]
        settings = self._optimizer.param_groups[group]
        rate = self._rate(step, group)
        ahead = [self._rate(min(newest + number, step), group) for number in range(max(0, int(gap)))]
        return self._kind.predict(Moment(values, state, settings, self._motion, gap, rate, ahead))

    @torch.no_grad()
    def learn(self, parameter: Tensor, before: Tensor, decay: float) -> None:
        """Take a step's change of a weight into the average of changes: ``decay`` of it stays, from zero on.

        Args:
            parameter: the weight after the step.
            before: its values before the step.
            decay: the part that stays, in [0, 1).
        """
        change = parameter.detach() - before
        for state in self._states(parameter):
            if DRIFT_KEY not in state:
                state[DRIFT_KEY] = torch.zeros_like(before)
            state[DRIFT_KEY].mul_(decay).add_(change, alpha=1 - decay)
            if isinstance(self._optimizer, MasterWeights):
                self._optimizer.state[parameter][DRIFT_KEY] = state[DRIFT_KEY]

    def _states(self, parameter: Tensor) -> Iterator[dict[str, Any]]:
        """The state that the optimizer keeps of a weight, or of its master."""
        if isinstance(self._optimizer, MasterWeights):
            yield self._optimizer.inner.state[self._optimizer.master_of(parameter)]
        else:
            yield self._optimizer.state[parameter]

    def _has_begun(self, state: Mapping[str, Any]) -> bool:
        if self._kind.reads:
            return all(key in state for key in self._kind.reads)
        assert self._motion is not None  # a rule requires it
        return self._motion.has_begun(state)

    def _rate(self, step: int, group: int) -> float:
        rates = self._rates_of(step)
        return float(self._optimizer.param_groups[group]["lr"] if rates is None else rates[group])


def _motion_of(optimizer: Optimizer) -> Motion | None:
    kind = kind_of_class(type(optimizer))
    return None if kind is None else kind.motion


def _keep_gradients(optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
    """Keep a step's gradients in the states; before the first step, an optimizer would take its state for complete."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            if LAST_GRADIENT not in state:
                state[LAST_GRADIENT] = torch.empty_like(parameter.grad, memory_format=torch.preserve_format)
            state[LAST_GRADIENT].copy_(parameter.grad)
