"""The interface between the engine and an optimizer that shards gradients and states over replicas.

The engine remains responsible for the schedule, messages, losses, accumulation over micro-batches, the one division at
STEP, and the verdict on whether gradients are finite. A :class:`Sharding` takes the gradients of a stage from autograd
and updates the stage's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from runner.engine.loss_scale import LossScaling
from runner.engine.transport.base import Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.update import Update, Verdict
from runner.model.tags import ParameterTag

__all__ = ["KeptElsewhere", "ShardedUpdate", "Sharding"]


class Sharding(Protocol):
    """Reduces and keeps the gradients of one stage and updates its weights, together with the stage's other replicas.

    Every replica calls every method the same number of times in the same order.
    """

    def forward(self, value: Any, before_layer: Callable[[int], None] | None) -> Any:
        """Run the stage on ``value`` and return its output.

        Args:
            value: the stage's input.
            before_layer: called with a layer's index before the layer runs, or None.
        """
        ...

    def begin(self, backwards: int) -> None:
        """Prepare for a step; ``backwards`` is the number of backwards before the next update."""
        ...

    def backward(self, roots: Sequence[Tensor], gradients: Sequence[Tensor] | None) -> None:
        """Run one backward, and take over the gradients of the weights."""
        ...

    def are_finite(self) -> bool:
        """Whether all gradients of the whole model are finite; the answer is the same on every rank."""
        ...

    def divide_at_update(self, divisor: float) -> None:
        """Set the number by which the update divides the sum of gradients over all replicas and micro-batches."""
        ...

    def norm(self) -> float | None:
        """The global gradient norm before clipping in the last update; None if nothing clips."""
        ...

    def discard(self, *, applied: bool) -> None:
        """Drop the gradients that were added since the last update.

        Args:
            applied: whether the weights were updated by them.
        """
        ...


class KeptElsewhere(StageGradients):
    """Represents gradients that a :class:`Sharding` keeps: it knows their parameters, but has no buffer."""

    def __init__(self, parameters: Sequence[tuple[str, Parameter]], tag: ParameterTag | None = None) -> None:
        super().__init__((), tag)
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]


class ShardedUpdate(Update):
    """The update at STEP of a stage whose gradients a :class:`Sharding` keeps."""

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

    def close(self, *, applied: bool = False) -> None:
        self._sharding.discard(applied=applied)
