"""What STEP does once a step's sums are complete: one verdict on them, one scaling, clipping, update, clearing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.transport.base import Gathering, Transport
from runner.engine.update.gradients import StageGradients
from runner.engine.update.loss_scale import LossScale, LossScaling

__all__ = ["Update", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """On a step's gradients.

    Args:
        finite: there is no NaN and no infinity.
        norm: before clipping; None where nothing clips by norm, or not finite.
        factor: what clipping multiplies the gradients by.
    """

    finite: bool
    norm: float | None = None
    factor: float = 1.0


class Update:
    """The weights' part of STEP on one rank: :meth:`open`, then a verdict, then :meth:`apply` or not, then close.

    Args:
        gradients: sets of this rank's gradients that are updated together, sums over micro-batches and replicas.
        pipeline: global ranks that share a verdict and a norm; empty where each judges by itself. Replicas hold equal
            sums, and come to the same.
        transport: how these ranks talk.
        clip_norm, clip_value: see :class:`runner.engine.options.EngineOptions`.
        scaling: of the loss, or None.
    """

    def __init__(
        self,
        *,
        gradients: Sequence[StageGradients],
        pipeline: tuple[int, ...],
        transport: Transport,
        clip_norm: float | None,
        clip_value: float | None,
        scaling: LossScaling | None,
    ) -> None:
        self.scale = LossScale(scaling)
        self._gradients = tuple(gradients)
        self._pipeline = pipeline
        self._transport = transport
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self._step: Callable[[], None] = _no_optimizer
        self._master_of: Callable[[Tensor], Parameter] | None = None
        self._final: Sequence[StageGradients] = ()
        self._most_values: int | None = None  # that a rank of the pipeline tells the others
        self._own: list[float] = []
        self._gathering: Gathering | None = None

    def attach(self, step: Callable[[], None], master_of: Callable[[Tensor], Parameter] | None) -> None:
        """Set what updates the weights from their gradients, or from those of their fp32 masters."""
        self._step = step
        self._master_of = master_of

    def open(self, weight: float) -> None:
        """Turn sums into means of the unscaled loss's gradients.

        With master weights all of it happens in fp32. Gradients that are not finite stay as they are.
        """
        finite = all(gradients.are_finite() for gradients in self._gradients)
        self._own = [float(finite)]
        if finite:
            self._final = self._widened()
            for gradients in self._final:
                gradients.divide(weight * self.scale.of_sum)
                if self._clip_value is not None:
                    gradients.clamp(self._clip_value)
            if self._clip_norm is not None:
                self._own += [square for gradients in self._final for square in gradients.squares()]

    def announce(self) -> None:
        """Start telling the other ranks how this one's gradients are, before waiting for theirs."""
        if len(self._pipeline) > 1:
            self._gathering = self._transport.start_all_gather(self._message(), self._pipeline)

    def own_verdict(self) -> Verdict:
        """Judges this rank's gradients alone; what it finds not finite, :meth:`verdict` does too."""
        return self._judge([self._own])

    def verdict(self) -> Verdict:
        """On the gradients of all ranks of the pipeline, the same on each of them; waits for the last of them."""
        if len(self._pipeline) <= 1:
            return self._judge([self._own])
        gathering, self._gathering = self._gathering, None
        parts = gathering.wait() if gathering else self._transport.all_gather(self._message(), self._pipeline)
        return self._judge([part.tolist() for part in parts])

    def apply(self, factor: float, step: Callable[[], None] | None = None) -> None:
        """Scale the gradients by what clipping says, and update the weights.

        Args:
            step: in place of the attached one.
        """
        if factor < 1.0:
            for gradients in self._final:
                gradients.scale(factor)
        (step or self._step)()

    def norm_of(self, verdict: Verdict) -> float | None:
        """The gradients' norm before clipping, once a step has ended."""
        return verdict.norm

    def close(self) -> None:
        """Let go of the gradients, whatever became of them."""
        if self._master_of is not None:
            for gradients in self._final:
                gradients.release()
        self._final = ()
        for gradients in self._gradients:
            gradients.zero()

    def _widened(self) -> Sequence[StageGradients]:
        if self._master_of is None:
            return self._gradients
        return [gradients.widened(self._master_of) for gradients in self._gradients]

    def _judge(self, opinions: list[list[float]]) -> Verdict:
        """The norm is the exact sum of per-parameter squares in float64, whatever the layout."""
        if not all(opinion[0] for opinion in opinions):
            return Verdict(finite=False)
        if self._clip_norm is None:
            return Verdict(finite=True)
        norm = math.sqrt(math.fsum(square for opinion in opinions for square in opinion[1:]))
        return Verdict(finite=True, norm=norm, factor=min(1.0, self._clip_norm / (norm + 1e-6)))

    def _message(self) -> Tensor:
        """This rank's opinion, as long as the longest one of the pipeline; how long that is, is asked once."""
        device = self._transport.device
        if self._most_values is None:
            counted = sum(len(gradients.names) for gradients in self._gradients if gradients.counted)
            own = torch.tensor([1 + (counted if self._clip_norm is not None else 0)], device=device)
            self._most_values = max(int(count) for count in self._transport.all_gather(own, self._pipeline))
        message = torch.zeros(self._most_values, dtype=torch.float64, device=device)
        message[: len(self._own)] = torch.tensor(self._own, dtype=torch.float64)
        return message


def _no_optimizer() -> None:
    raise RuntimeError("the engine has no optimizer: call attach_optimizer first")
