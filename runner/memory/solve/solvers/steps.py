"""When to keep hidden or internal states of equal steps, in memory that is measured in hidden states."""

from __future__ import annotations

from enum import Enum

import numpy as np

__all__ = ["StepPlan", "Stored", "Variant"]


class Variant(Enum):
    """What a plan may keep of a step."""

    HSM = "hsm"
    """Hidden states: a step's input, from which the steps that follow are run again."""

    ISM = "ism"
    """Internal states: all that the backward of a step needs."""

    MSM = "msm"
    """Either."""


class Stored(Enum):
    """What is kept of a step."""

    HIDDEN = "hidden"
    INTERNAL = "internal"


class StepPlan:
    """The least forwards of t equal steps in m hidden states of memory, for all t and m.

    With C(t, m) for this number, C(0, m) = 0 and C(1, m) = 1, because a step whose internal state was not kept runs
    forward once more for its backward. To keep the hidden state after y steps costs y + C(t - y, m - 1) + C(y, m). To
    keep the internal state of step y costs y + C(t - y, m - size) + C(y - 1, m).

    Source: Gruslys et al. 2016, Memory-Efficient Backpropagation Through Time.

    Args:
        steps: the number of steps.
        memory: hidden states that may be kept at once.
        size: an internal state in hidden states, rounded up.
        variant: what may be kept.
    """

    def __init__(self, steps: int, memory: int, size: int, variant: Variant) -> None:
        self._size, self._variant = size, variant
        self._least = least = np.full((steps + 1, memory + 1), np.inf)  # by steps and memory
        least[0], least[1:2] = 0.0, 1.0
        for count in range(2, steps + 1):
            np.minimum(self._hidden(count).min(axis=0), self._internal(count).min(axis=0), out=least[count])

    def forwards(self, steps: int, memory: int) -> float:
        """The least forwards, infinite if there is no way."""
        return float(self._least[steps, memory])

    def choice(self, steps: int, memory: int) -> tuple[Stored, int]:
        """What to keep first of a part, and y, the number of its step; steps must be at least 2."""
        hidden, internal = self._hidden(steps)[:, memory], self._internal(steps)[:, memory]
        if hidden.min() <= internal.min():
            return Stored.HIDDEN, int(hidden.argmin()) + 1
        return Stored.INTERNAL, int(internal.argmin()) + 1

    def _hidden(self, count: int) -> np.ndarray:
        """The forwards if the hidden state after y = 1 .. count - 1 steps is kept, a row each; a column by memory."""
        least = self._least
        found = np.full((count - 1, least.shape[1]), np.inf)
        if self._variant is not Variant.ISM:
            np.add(least[count - 1 : 0 : -1, :-1], least[1:count, 1:], out=found[:, 1:])
        found += np.arange(1, count)[:, None]
        return found

    def _internal(self, count: int) -> np.ndarray:
        """The forwards if the internal state of step y = 1 .. count is kept, a row each; a column by memory."""
        size, least = self._size, self._least
        found = np.full((count, least.shape[1]), np.inf)
        if self._variant is not Variant.HSM and size < least.shape[1]:
            np.add(least[count - 1 :: -1, :-size], least[:count, size:], out=found[:, size:])
        found += np.arange(1, count + 1)[:, None]
        return found
