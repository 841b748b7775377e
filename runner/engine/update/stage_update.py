"""The optimizer step of stages of one rank that are updated together: when their sums are complete, update or skip.

A flushed schedule updates all stages of a rank together, after all ranks of the pipeline have agreed on the verdict. An
asynchronous schedule updates each stage by itself, because the gradients of other ranks do not exist at that moment.

With post-validation, no rank waits for the verdict. A rank updates its weights if its own gradients allow this, and
begins the next window. If the gradients of another rank forbid the update, the rank takes it back exactly.

Source of the protocol: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4. Here, ranks exchange what they
know of their gradients in one asynchronous all-gather instead of a chain of messages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from runner.engine.asks import asks_for_save, asks_for_stop
from runner.engine.measure.timeline import Timeline
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.update.update import Update, Verdict
from runner.engine.window import Window

__all__ = ["AroundStep", "Backup", "NotFiniteError", "NothingCountsError", "StageUpdate"]

logger = logging.getLogger(__name__)


class Backup(Protocol):
    """A copy of weights and optimizer states, by which post-validation takes a step back.

    It is implemented by :class:`runner.optim.states.backup.OptimizerBackup`.
    """

    def save(self) -> None:
        """Copy the weights and states before a step."""

    def restore(self) -> None:
        """Undo the step since the last :meth:`save`."""

    def step_as_saved(self) -> None:
        """Step with the hyperparameters that were set at the last :meth:`save`."""


class AroundStep(Protocol):
    """Something that is done before and after each optimizer step of a stage."""

    def before_step(self, window: int) -> None:
        """Prepare the optimizer step of ``window``, whose gradients are complete."""

    def after_step(self) -> None:
        """Follow the step."""


class NotFiniteError(Exception):
    """Raised if the loss or gradients of a step are not finite and the step must not be skipped.

    Args:
        window: the step's window.
        what: a text with the loss, which says whether a gradient is not finite.
    """

    def __init__(self, window: Window, what: str) -> None:
        super().__init__(what)
        self.window = window
        self.what = what


class NothingCountsError(NotFiniteError):
    """Raised if the losses of a step have no weight at all, so that they have no mean, and it must not be skipped."""


@dataclass
class _Pending:
    """A step whose verdict is not known yet; ``stepped`` says whether this rank has updated its weights in it."""

    window: Window
    loss: float
    stepped: bool
    scale: dict[str, Any]  # the loss scale's state before the step


class StageUpdate:
    """Ends the optimizer steps of stages that are updated together.

    Args:
        stages: these stages, which are on this rank.
        options: settings of the run.
        update: judges the gradients and updates the weights.
        around: what is done before and after each step, in this order: weight stores first.
    """

    def __init__(
        self, stages: Iterable[int], options: EngineOptions, update: Update, around: Iterable[AroundStep] = ()
    ) -> None:
        self.stages = frozenset(stages)
        self.update = update
        self.backup: Backup | None = None
        self.taken_back: list[TakenBack] = []
        self._options = options
        self._around = tuple(around)
        self._pending: _Pending | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the verdict on the last step is not known yet, so that the step may be taken back."""
        return self._pending is not None

    def finish(self, window: Window, timeline: Timeline) -> FinishedStep:
        """Update the weights, or skip the step; with post-validation, update before all ranks have agreed.

        Args:
            window: the step's window. Its loss, and the gradients of the stages, are sums over all micro-batches and
                replicas.
            timeline: the time of waiting and of the update is added to it.

        Raises:
            NotFiniteError: the step is not finite, or nothing in it counts, and it must not be skipped.
        """
        start = timeline.moment()
        total, weight = window.loss.tolist()
        if weight == 0.0:
            return self._pass_over(window)
        scale = self.update.scale.value if self.update.scale.is_dynamic else None
        loss_is_finite = math.isfinite(total) and math.isfinite(weight)
        if loss_is_finite:
            self.update.open(weight)
        agreed = timeline.moment()
        speculative = self._options.post_validation and loss_is_finite
        if speculative:
            verdict = self._speculate(window, total / weight)
        else:
            verdict = self.update.verdict() if loss_is_finite else Verdict(finite=False)
            agreed = timeline.moment()
            self._conclude(window, total / weight, verdict)
        timeline.add("waited_at_step", start, agreed)
        timeline.add("optimizer", agreed)
        skipped = not verdict.finite and not speculative
        self.update.scale.weigh(weight)
        norm = self.update.norm_of(verdict)
        stop, save = asks_for_stop(window.asks), asks_for_save(window.asks)
        figures, samples = self._figures(window.metrics)
        return FinishedStep(window.step, total / weight, norm, stop, save, skipped, scale, figures, samples)

    def _figures(self, rows: Tensor) -> tuple[tuple[float, ...], int]:
        """The values of the figures beside the loss, and the number of samples that they are over."""
        values, start = [], 0
        for figure in self._options.figures:
            values.append(figure.value(rows[start : start + figure.num_rows]))
            start += figure.num_rows
        return tuple(values), round(float(rows[0, 1])) if start else 0

    def _pass_over(self, window: Window) -> FinishedStep:
        """Skip a step in which nothing counts. Every rank knows the weight of the step, so that they need not ask."""
        self.update.close()
        if not self._options.skip_nonfinite:
            raise NothingCountsError(window, "nothing in it counts, because the weights of its losses add up to 0")
        logger.info("step %d is skipped: nothing in it counts", window.step + 1)
        stop, save = asks_for_stop(window.asks), asks_for_save(window.asks)
        scale = self.update.scale.value if self.update.scale.is_dynamic else None
        return FinishedStep(window.step, math.nan, None, stop, save, skipped=True, loss_scale=scale)

    def settle(self, timeline: Timeline, begun: Callable[[], None] | None = None) -> bool:
        """Wait for the verdict on the last step, and take the step back if the verdict demands it.

        Args:
            timeline: the time of waiting is added to it.
            begun: called before the step is taken back; it drops the forwards of the next window that have run.

        Returns:
            True if the step was taken back, so that the beginning of the next window must run again.

        Raises:
            NotFiniteError: the step is not finite and must not be skipped.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        start = timeline.moment()
        verdict = self.update.verdict()
        timeline.add("waited_at_step", start)
        if verdict.finite and verdict.factor == 1.0:
            assert pending.stepped  # the norm of one rank is never larger than that of all ranks together
            self.update.close(applied=True)
            return False
        if begun is not None:
            begun()
        self._take_back(pending, verdict)
        return True

    def _speculate(self, window: Window, loss: float) -> Verdict:
        """Update at once if this rank's own gradients allow it; the norm of all ranks is not known yet."""
        assert self.backup is not None
        self.update.announce()
        own = self.update.own_verdict()
        allowed = own.finite and own.factor == 1.0
        self._pending = _Pending(window, loss, allowed, self.update.scale.state_dict())
        if allowed:
            self.backup.save()
            self.update.apply(1.0)
            self.update.scale.succeeded()
        return Verdict(own.finite)

    def _take_back(self, pending: _Pending, verdict: Verdict) -> None:
        """Undo the update, if this rank has made it, and then follow the verdict with the same gradients."""
        assert self.backup is not None
        self.taken_back.append(TakenBack(pending.window.step, skipped=not verdict.finite, grad_norm=verdict.norm))
        if pending.stepped:
            self.backup.restore()
            self.update.scale.load_state_dict(pending.scale)
        step = self.backup.step_as_saved if pending.stepped else None
        self._conclude(pending.window, pending.loss, verdict, step)

    def _conclude(self, window: Window, loss: float, verdict: Verdict, step: Callable[[], None] | None = None) -> None:
        """Update the weights or skip the step, as the verdict says.

        Args:
            window: the step's window.
            loss: the mean loss of the step.
            verdict: the verdict on the step's gradients.
            step: updates the weights instead of the optimizer's own step, if given.

        Raises:
            NotFiniteError: the step is not finite and must not be skipped.
        """
        scale = self.update.scale
        if verdict.finite:
            for each in self._around:
                each.before_step(window.step)
            self.update.apply(verdict.factor, step)
            for each in self._around:
                each.after_step()
            self.update.close(applied=True)
            scale.succeeded()
            return
        self.update.close()
        if scale.overflowed() or self._options.skip_nonfinite:
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss}, but a gradient is not finite"
        raise NotFiniteError(window, what)
