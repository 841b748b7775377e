"""Dynamic loss scaling keeps small gradients in float16 above zero; an overflow costs one step, on every rank.

The scale depends only on the verdicts, which are the same on all ranks, so that each rank computes the scale by itself.
The rule is that of torch.amp.GradScaler: the scale shrinks at an overflow, and grows after ``growth_interval`` good
steps in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["LossScale", "LossScaling"]


@dataclass(frozen=True)
class LossScaling:
    """The settings of loss scaling, which do not change during a run.

    Args:
        initial_scale: factor of the loss per sample at the beginning.
        growth_interval: number of steps without overflow before the scale grows.
        growth_factor: factor by which the scale grows.
        backoff_factor: factor by which the scale shrinks at an overflow.
        minimum_scale: smallest scale; the scale is not the cause of an overflow that happens there.
        samples: number of samples of a step, over all replicas. Losses are sums, of which the first step is multiplied
            by ``scale / 2**floor(log2(samples))`` and later ones with the weight of the first step in place of the
            samples. So the scale is one of the mean, and does not depend on the size of the batch.
    """

    initial_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum_scale: float = 2.0**-24
    samples: int = 1


class LossScale:
    """The current scale of the loss; without ``scaling`` it is always 1."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.value = scaling.initial_scale if scaling is not None else 1.0
        self._good_steps = 0
        self._divisor = _power_of_two(scaling.samples) if scaling is not None else 1.0
        self._is_weighed = False

    @property
    def is_dynamic(self) -> bool:
        return self._scaling is not None

    @property
    def of_sum(self) -> float:
        """The factor by which the loss, a sum, is multiplied before its backward."""
        return self.value / self._divisor

    def weigh(self, weight: float) -> None:
        """Note what the loss of a step is divided by; the first step decides, for instance by its number of tokens."""
        if self._scaling is not None and not self._is_weighed:
            self._divisor, self._is_weighed = _power_of_two(weight), True

    def succeeded(self) -> None:
        """Note that a step's gradients were finite."""
        if self._scaling is None:
            return
        self._good_steps += 1
        if self._good_steps >= self._scaling.growth_interval:
            self._good_steps = 0
            self.value *= self._scaling.growth_factor

    def overflowed(self) -> bool:
        """Note that a step's loss or gradients were not finite; return whether a smaller scale may help."""
        if self._scaling is None or self.value <= self._scaling.minimum_scale:
            return False
        self._good_steps = 0
        self.value = max(self.value * self._scaling.backoff_factor, self._scaling.minimum_scale)
        return True

    def state_dict(self) -> dict[str, Any]:
        """The values that a resumed run needs to continue with the same scale."""
        weighed = {"divisor": self._divisor} if self._is_weighed else {}
        return {"value": self.value, "good_steps": self._good_steps, **weighed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
        self._is_weighed = "divisor" in state
        if self._is_weighed:
            self._divisor = float(state["divisor"])


def _power_of_two(number: float) -> float:
    """The largest power of two that is not above a number, and 1 at least."""
    return 2.0 ** math.floor(math.log2(max(1.0, number)))
