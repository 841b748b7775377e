"""Measures an optimizer's own work for a layer, which schedules may put into bubbles."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.profile import FillProfile

__all__ = ["FillProfiler", "TimeFills"]

TimeFills = Callable[[Iterable[FillProfile]], tuple[FillProfile, ...]]
"""Returns the same fills with measured seconds."""


class FillProfiler(Protocol):
    """Measures the work of one optimizer. ``tied`` are the weights that other layers hold, too."""

    def state_bytes(self, module: nn.Module, tied: Collection[Tensor]) -> int:
        """The bytes that the optimizer keeps for a layer besides the states of its parameters."""
        ...

    def fills(
        self, module: nn.Module, tied: Collection[Tensor], function: Callable[[Any], Any], value: Any
    ) -> tuple[FillProfile, ...]:
        """The work that the optimizer does for a layer; its seconds are zero.

        Args:
            module: the layer's module.
            tied: weights that other layers hold, too.
            function: runs the layer, given ``value``.
            value: one micro-batch of its input, real or fake.
        """
        ...

    def timer(self, device: torch.device, now: Callable[[], float]) -> TimeFills:
        """Return a function that adds measured seconds to fills.

        Args:
            device: where they are done.
            now: the clock.
        """
        ...
