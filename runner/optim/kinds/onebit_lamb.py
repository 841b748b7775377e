"""1-bit LAMB: LAMB up to a given step, then momentum exchanged in bits and a frozen, scaled rate of each tensor.

A tensor's rate is the ratio of its norm to the norm of its update. When the variance no longer changes, that ratio is
out of date. Then the rate is the running mean of the ratio in the warm-up, times a factor that says how the variance
would have changed. For this a second variance is updated, with gradients reconstructed from two momenta:
g = (m - beta1 m_before) / (1 - beta1).

DeepSpeed brings the momenta of all tensors to one size before it compresses them, because they share one scale. Here
each tensor has its own scales, and compressing s z gives s times the result of compressing z, so this would change
nothing.

Source: Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), algorithm 1; its limits are the defaults of
deepspeed/runtime/fp16/onebit/lamb.py before 0.19.7, whose first step only creates the states; here it also updates the
weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from runner.optim.kinds.onebit import OneBitOptimizer

__all__ = ["OneBitLamb"]

_RATES = (0.01, 10.0)  # smallest and largest rate of a tensor in the warm-up
_RATE_BETA = 0.9  # decay of the running mean of rates
_FACTORS = (0.5, 4.0)  # smallest and largest factor of the frozen rate
_MOST_CHANGE = 0.1  # largest relative change of the factor in a step


class OneBitLamb(OneBitOptimizer):
    """The optimizer of this module; its arguments are those of :class:`OneBitOptimizer`."""

    option = "onebit_lamb"
    state_names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._before: dict[Tensor, Tensor] = {}  # momenta before the present step

    def _accumulate(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        if compressed:
            self._before[parameter] = state["exp_avg"].clone()
        super()._accumulate(parameter, state, compressed=compressed)
        if not compressed:
            state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])

    def _update(self, parameter: Tensor, state: dict[str, Any], *, compressed: bool) -> None:
        group = self.param_groups[0]
        denominator = state["exp_avg_sq"].sqrt() + group["eps"]
        adam = state["exp_avg"] / denominator
        update = adam + group["weight_decay"] * parameter if group["weight_decay"] else adam
        if compressed:
            self._refresh_variance(parameter, state)
            rate = self._frozen_rate(state, denominator, adam, update)
        else:
            rate = _warm_rate(state, parameter, update)
        parameter.add_(update, alpha=-group["lr"] * rate)

    def _refresh_variance(self, parameter: Tensor, state: dict[str, Any]) -> None:
        first, second = self.param_groups[0]["betas"]
        gradient = (state["exp_avg"] - first * self._before.pop(parameter)) / (1 - first)
        state["exp_avg_sq_fresh"].mul_(second).addcmul_(gradient, gradient, value=1 - second)

    def _frozen_rate(self, state: dict[str, Any], denominator: Tensor, adam: Tensor, update: Tensor) -> float:
        """The mean rate of the warm-up times the largest ratio of the frozen to the fresh denominator, limited."""
        fresh = state["exp_avg_sq_fresh"].sqrt() + self.param_groups[0]["eps"]
        factor = float((denominator / fresh).max())
        length = float(update.norm())
        share = min(1.0, float(adam.norm()) / length) if length else 1.0  # the part that the variance divides
        last = state.get("factor", 1.0)
        factor = _within(factor * share + 1 - share, *_FACTORS)
        state["factor"] = _within(factor, last * (1 - _MOST_CHANGE), last * (1 + _MOST_CHANGE))
        return float(state.get("rate", 0.0) * state["factor"])


def _warm_rate(state: dict[str, Any], parameter: Tensor, update: Tensor) -> float:
    """LAMB's rate, which the running mean takes in unless it is 1 because a norm is zero."""
    norm, length = float(parameter.norm()), float(update.norm())
    if not norm or not length:
        return 1.0
    rate = _within(norm / length, *_RATES)
    state["rate"] = _RATE_BETA * state.get("rate", 0.0) + (1 - _RATE_BETA) * rate
    return rate


def _within(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))
