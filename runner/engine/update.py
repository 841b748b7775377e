"""What STEP does once a step's sums are complete: one verdict on them, one scaling, clipping, update, clearing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.gradients import StageGradients
from runner.engine.loss_scale import LossScale, LossScaling
from runner.engine.transport import Transport

__all__ = ["Update"]


class Update:
    """The weights' part of STEP on one rank.

    Args:
        gradients: of each of this rank's stages, sums over micro-batches and replicas.
        pipeline: global ranks that share a verdict and a norm. Replicas hold equal sums, and come to the same.
        transport: how these ranks talk.
        clip_norm, clip_value: see :class:`runner.engine.engine.EngineOptions`.
        scaling: of the loss, or None.
    """

    def __init__(
        self,
        *,
        gradients: Mapping[int, StageGradients],
        pipeline: tuple[int, ...],
        transport: Transport,
        clip_norm: float | None,
        clip_value: float | None,
        scaling: LossScaling | None,
    ) -> None:
        self.scale = LossScale(scaling)
        self._gradients = gradients
        self._pipeline = pipeline
        self._transport = transport
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._step: Callable[[], None] = _no_optimizer
        self._master_of: Callable[[Tensor], Parameter] | None = None

    def attach(self, step: Callable[[], None], master_of: Callable[[Tensor], Parameter] | None) -> None:
        """Set what updates the weights from their gradients, or from those of their fp32 masters."""
        self._step = step
        self._master_of = master_of

    def agree_finite(self) -> bool:
        """Whether all gradients of the pipeline are finite; the same answer on each of its ranks."""
        own = all(gradients.are_finite() for gradients in self._gradients.values())
        if len(self._pipeline) == 1:
            return own
        verdict = torch.tensor([int(own)], device=self._transport.device)
        return all(int(one) for one in self._transport.all_gather(verdict, self._pipeline))

    def apply(self, weight: float) -> float | None:
        """Turn sums into means of the unscaled loss's gradients, clip, update, clear; the norm before clipping.

        With master weights all of it happens in fp32.
        """
        final = self._final()
        for gradients in final.values():
            gradients.divide(weight * self.scale.of_sum)
        norm = self._clip(final)
        self._step()
        if self._master_of is not None:
            for gradients in final.values():
                gradients.release()
        self.clear()
        return norm

    def clear(self) -> None:
        for gradients in self._gradients.values():
            gradients.zero()

    def _final(self) -> Mapping[int, StageGradients]:
        if self._master_of is None:
            return self._gradients
        return {stage: gradients.widened(self._master_of) for stage, gradients in self._gradients.items()}

    def _clip(self, final: Mapping[int, StageGradients]) -> float | None:
        """Clip by value, or scale down to the largest global norm allowed.

        The norm is the exact sum of per-parameter squares in float64, whatever the layout.
        """
        if self._clip_value is not None:
            for gradients in final.values():
                gradients.clamp(self._clip_value)
        if self._clip_norm is None:
            return None
        squares = [square for stage in sorted(final) for square in final[stage].squares()]
        norm = math.sqrt(math.fsum(self._gather(squares)))
        factor = min(1.0, self._clip_norm / (norm + 1e-6))
        if factor < 1.0:
            for gradients in final.values():
                gradients.scale(factor)
        return norm

    def _gather(self, values: list[float]) -> list[float]:
        """The values of all ranks of the pipeline."""
        if len(self._pipeline) == 1:
            return values
        own = torch.tensor([len(values)], device=self._transport.device)
        length = max(int(count) for count in self._transport.all_gather(own, self._pipeline))
        padded = torch.zeros(length, dtype=torch.float64, device=self._transport.device)
        padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
        return [value for part in self._transport.all_gather(padded, self._pipeline) for value in part.tolist()]


def _no_optimizer() -> None:
    raise RuntimeError("the engine has no optimizer: call attach_optimizer first")
