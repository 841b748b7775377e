"""Gradients and optimizer states that replicas share out among themselves: where a sharded optimizer meets the engine.

The engine keeps its part: schedule, messages, losses, accumulation over micro-batches, the one division at STEP, the
verdict on what is not finite. A :class:`Sharding` takes a stage's gradients over from autograd and updates its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from runner.engine.transport.base import Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.loss_scale import LossScaling
from runner.engine.update.update import Update, Verdict
from runner.model.tags import ParameterTag

__all__ = ["KeptElsewhere", "ShardedUpdate", "Sharding"]


class Sharding(Protocol):
    """Reduces and keeps one stage's gradients, and updates its weights, together with the stage's other replicas.

    Every replica calls every method the same number of times in the same order.
    """

    def forward(self, value: Any, before_layer: Callable[[int], None] | None) -> Any:
        """Run the stage."""
        ...

    def begin(self, backwards: int) -> None:
        """So many backwards follow before the next update."""
        ...

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        """Run one backward and take the gradients of the weights."""
        ...

    def are_finite(self) -> bool:
        """Whether all gradients of the whole model are; the same answer on every rank."""
        ...

    def divide_at_update(self, divisor: float) -> None:
        """What the sum of gradients over all replicas and micro-batches is divided by in the update."""
        ...

    def norm(self) -> float | None:
        """The global norm that the last update was clipped by; None where nothing clips."""
        ...

    def discard(self) -> None:
        """Forget the gradients since the last update."""
        ...


class KeptElsewhere(StageGradients):
    """The engine's view of gradients that a :class:`Sharding` keeps: their parameters, and no buffer."""

    def __init__(self, parameters: Sequence[tuple[str, Parameter]], tag: ParameterTag | None = None) -> None:
        super().__init__((), tag)
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]


class ShardedUpdate(Update):
    """STEP's update where a :class:`Sharding` holds the gradients."""

    def __init__(self, sharding: Sharding, transport: Transport, scaling: LossScaling | None) -> None:
        super().__init__(
            gradients=(), pipeline=(), transport=transport, clip_norm=None, clip_value=None, scaling=scaling
        )
        self._sharding = sharding

    def open(self, weight: float) -> None:
        self._sharding.divide_at_update(weight * self.scale.of_sum)

    def verdict(self) -> Verdict:
        return Verdict(finite=self._sharding.are_finite())

    def norm_of(self, verdict: Verdict) -> float | None:
        return self._sharding.norm() if verdict.finite else None

    def close(self) -> None:
        self._sharding.discard()
