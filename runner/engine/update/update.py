"""The update at STEP, when the sums of a step are complete: judge, scale and clip the gradients, update, clear them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from runner.engine.loss_scale import LossScale, LossScaling
from runner.engine.transport.base import Gathering, Transport
from runner.engine.update.gradients import StageGradients

__all__ = ["Update", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """The verdict on a step's gradients.

    Args:
        finite: whether no gradient is NaN or infinite.
        norm: their norm before clipping; None if nothing clips by norm, or if they are not finite.
        factor: the factor by which clipping multiplies the gradients.
    """

    finite: bool
    norm: float | None = None
    factor: float = 1.0


class Update:
    """Judges the gradients of one rank and updates its weights at STEP.

    Call :meth:`open`, then :meth:`verdict`, then :meth:`apply` if the verdict allows it, and then :meth:`close`.

    Args:
        gradients: the sets of this rank's gradients that are updated together; sums over micro-batches and replicas.
        pipeline: global ranks that share a verdict and a norm; empty if each rank judges by itself. Replicas hold equal
            sums, so they come to the same verdict.
        transport: sends messages between these ranks.
        clip_norm, clip_value: see :class:`runner.engine.options.EngineOptions`.
        scaling: settings of loss scaling, or None.
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
        self._most_values: int | None = None  # length of the longest message of a rank to the others
        self._own: list[float] = []
        self._gathering: Gathering | None = None

    def attach(self, step: Callable[[], None], master_of: Callable[[Tensor], Parameter] | None) -> None:
        """Set the optimizer's step.

        Args:
            step: updates the weights from their gradients, or from the gradients of their fp32 masters.
            master_of: returns the fp32 master of a weight; None if weights have no masters.
        """
        self._step = step
        self._master_of = master_of

    def open(self, weight: float) -> None:
        """Turn the sums into gradients of the mean loss without its scale, and clip them by value.

        With master weights, all of this is done in fp32. If some gradients are not finite, none are changed.

        Args:
            weight: sum of the samples' weights in the step.
        """
        for gradients in self._gradients:
            gradients.learn_reached()
        finite = all(gradients.are_finite() for gradients in self._gradients)
        self._own = [float(finite)]
        if finite:
            self._final = self._widened()
            for own, final in zip(self._gradients, self._final, strict=True):
                own.leave_out_unreached(final)
            for gradients in self._final:
                gradients.divide(weight * self.scale.of_sum)
                if self._clip_value is not None:
                    gradients.clamp(self._clip_value)
            if self._clip_norm is not None:
                self._own += [square for gradients in self._final for square in gradients.squares()]

    def announce(self) -> None:
        """Start to send the other ranks the facts about this rank's gradients, without waiting for those of theirs."""
        if len(self._pipeline) > 1:
            self._gathering = self._transport.start_all_gather(self._message(), self._pipeline)

    def own_verdict(self) -> Verdict:
        """Judge only this rank's gradients; if they are not finite, :meth:`verdict` says so on all ranks."""
        return self._judge([self._own])

    def verdict(self) -> Verdict:
        """Wait for all ranks of the pipeline and judge the gradients of all; the result is the same on each rank."""
        if len(self._pipeline) <= 1:
            return self._judge([self._own])
        gathering, self._gathering = self._gathering, None
        parts = gathering.wait() if gathering else self._transport.all_gather(self._message(), self._pipeline)
        return self._judge([part.tolist() for part in parts])

    def apply(self, factor: float, step: Callable[[], None] | None = None) -> None:
        """Multiply the gradients by the factor of clipping, and update the weights.

        Args:
            factor: the verdict's factor.
            step: called instead of the attached step, if given.
        """
        if factor < 1.0:
            for gradients in self._final:
                gradients.scale(factor)
        (step or self._step)()

    def norm_of(self, verdict: Verdict) -> float | None:
        """The norm of the gradients before clipping, after the step has ended."""
        return verdict.norm

    def close(self, *, applied: bool = False) -> None:
        """Clear the gradients, whether they were applied or not."""
        if self._master_of is not None:
            for gradients in self._final:
                gradients.release()
        self._final = ()
        for gradients in self._gradients:
            gradients.close(applied=applied)

    def _widened(self) -> Sequence[StageGradients]:
        if self._master_of is None:
            return self._gradients
        return [gradients.widened(self._master_of) for gradients in self._gradients]

    def _judge(self, opinions: list[list[float]]) -> Verdict:
        """Judge the messages of ranks. The norm is an exact sum of squares in float64, so that no layout changes it."""
        if not all(opinion[0] for opinion in opinions):
            return Verdict(finite=False)
        if self._clip_norm is None:
            return Verdict(finite=True)
        norm = math.sqrt(math.fsum(square for opinion in opinions for square in opinion[1:]))
        return Verdict(finite=True, norm=norm, factor=min(1.0, self._clip_norm / (norm + 1e-6)))

    def _message(self) -> Tensor:
        """What this rank tells the others, filled up to the longest message, whose length is exchanged once."""
        device = self._transport.device
        if self._most_values is None:
            counted = sum(name in each.counted for each in self._gradients for name in each.names)
            own = torch.tensor([1 + (counted if self._clip_norm is not None else 0)], device=device)
            self._most_values = max(int(count) for count in self._transport.all_gather(own, self._pipeline))
        message = torch.zeros(self._most_values, dtype=torch.float64, device=device)
        message[: len(self._own)] = torch.tensor(self._own, dtype=torch.float64)
        return message


def _no_optimizer() -> None:
    raise RuntimeError("the engine has no optimizer: call attach_optimizer first")
