"""Dynamic loss scaling: small gradients in float16 survive, and an overflow costs one step, the same on every rank.

The scale is a function of the verdicts that all ranks share, so that each computes it for itself. The rule is that of
torch.amp.GradScaler: shrink at an overflow, grow after so many good steps in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["LossScale", "LossScaling"]


@dataclass(frozen=True)
class LossScaling:
    """What the run fixes.

    Args:
        initial_scale: of the loss per sample.
        growth_interval: steps without overflow before the scale grows by ``growth_factor``.
        backoff_factor: what an overflow multiplies the scale by.
        minimum_scale: the scale goes no lower; an overflow there is none of its making.
        samples: of a step over all replicas. Losses are sums over samples, so that the sum is scaled by
            ``scale / 2**floor(log2(samples))``: what the loss per sample is scaled by does not grow with the batch.
    """

    initial_scale: float = 65536.0
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum_scale: float = 2.0**-24
    samples: int = 1


class LossScale:
    """The scale as it stands; without ``scaling`` it is 1 for ever."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.value = scaling.initial_scale if scaling is not None else 1.0
        self._good_steps = 0
        self._divisor = 2.0 ** math.floor(math.log2(max(1, scaling.samples))) if scaling is not None else 1.0

    @property
    def is_dynamic(self) -> bool:
        return self._scaling is not None

    @property
    def of_sum(self) -> float:
        """What the loss, as a sum over samples, is multiplied by before its backward."""
        return self.value / self._divisor

    def succeeded(self) -> None:
        """A step's gradients were finite."""
        if self._scaling is None:
            return
        self._good_steps += 1
        if self._good_steps >= self._scaling.growth_interval:
            self._good_steps = 0
            self.value *= self._scaling.growth_factor

    def overflowed(self) -> bool:
        """A step's loss or gradients were not finite; whether a smaller scale may help."""
        if self._scaling is None or self.value <= self._scaling.minimum_scale:
            return False
        self._good_steps = 0
        self.value = max(self.value * self._scaling.backoff_factor, self._scaling.minimum_scale)
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with the same scale."""
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self._good_steps = float(state["value"]), int(state["good_steps"])
