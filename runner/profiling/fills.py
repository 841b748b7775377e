"""What an optimizer's own work takes of a layer: the work that schedules may put into bubbles."""

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
    """Of one optimizer. ``tied`` are weights that other layers hold besides."""

    def state_bytes(self, module: nn.Module, tied: Collection[Tensor]) -> int:
        """What the optimizer keeps of a layer's modules, besides states of their parameters."""
        ...

    def fills(
        self, module: nn.Module, tied: Collection[Tensor], function: Callable[[Any], Any], value: Any
    ) -> tuple[FillProfile, ...]:
        """The work for a layer, without its seconds.

        Args:
            module: of the layer.
            tied: see above.
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
