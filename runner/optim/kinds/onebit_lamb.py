"""1-bit LAMB: LAMB until a step, from then on a momentum exchanged in bits and a frozen rate of each tensor, scaled.

A tensor's rate is the ratio of its norm to its update's. Once the variance stays, that ratio is a stale one: then
the rate is the warm-up's running mean of it, times a factor that says how the variance would have moved on. For that a
second variance goes on, of gradients reconstructed from two momenta: g = (m - beta1 m_before) / (1 - beta1).

DeepSpeed levels the momenta of tensors before it compresses, because one scale serves all of them. Here each tensor has
a scale of its own, and compressing s z gives s times what compressing z gives: levelling would change nothing.

Source: Li et al. 2021, "1-bit LAMB" (arXiv 2104.06069), algorithm 1; its limits are the defaults of
deepspeed/runtime/fp16/onebit/lamb.py before 0.19.7, whose first step only makes the states; here it updates as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from runner.optim.kinds.onebit import OneBitOptimizer

__all__ = ["OneBitLamb"]

_RATES = (0.01, 10.0)  # least and greatest rate of a tensor in warm-up
_RATE_BETA = 0.9  # of the running mean of rates
_FACTORS = (0.5, 4.0)  # least and greatest factor on the frozen rate
_MOST_CHANGE = 0.1  # of the factor in a step, as a part of it


class OneBitLamb(OneBitOptimizer):
    """See the module's text; arguments as of :class:`OneBitOptimizer`."""

    option = "onebit_lamb"
    state_names = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")

    def __init__(self, parameters: Iterable[Tensor], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._before: dict[Tensor, Tensor] = {}  # momenta, while a step goes on

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
        """The warm-up's mean rate times what the stale variance is too large by where it is most."""
        fresh = state["exp_avg_sq_fresh"].sqrt() + self.param_groups[0]["eps"]
        factor = float((denominator / fresh).max())
        length = float(update.norm())
        share = min(1.0, float(adam.norm()) / length) if length else 1.0  # of the update that the variance divides
        last = state.get("factor", 1.0)
        factor = _within(factor * share + 1 - share, *_FACTORS)
        state["factor"] = _within(factor, last * (1 - _MOST_CHANGE), last * (1 + _MOST_CHANGE))
        return float(state.get("rate", 0.0) * state["factor"])


def _warm_rate(state: dict[str, Any], parameter: Tensor, update: Tensor) -> float:
    """LAMB's, which the running mean takes in unless it is 1 for want of a norm."""
    norm, length = float(parameter.norm()), float(update.norm())
    if not norm or not length:
        return 1.0
    rate = _within(norm / length, *_RATES)
    state["rate"] = _RATE_BETA * state.get("rate", 0.0) + (1 - _RATE_BETA) * rate
    return rate


def _within(value: float, least: float, most: float) -> float:
    return max(least, min(most, value))
