"""The optimizer step of some of a rank's stages: once their sums are complete, the weights are updated or not.

A flushed schedule updates all stages of a rank together, after all ranks of the pipeline have agreed that they may. An
asynchronous one updates each stage by itself: no other rank's gradients are there at that moment.

With post-validation nobody waits for the agreement: a rank updates if its own gradients allow it, begins the next
window, and takes the update back, exactly, if another rank's gradients forbid it.

Source of the protocol: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4. The opinions travel here in one
asynchronous all-gather instead of a chain of messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from runner.engine.measure.timeline import StepTimes
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.update.update import Update, Verdict
from runner.engine.weights.store import WeightStore
from runner.engine.window import Window
from runner.errors import RunFailedError

__all__ = ["Backup", "NotFiniteError", "StageUpdate"]


class Backup(Protocol):
    """What post-validation asks of an optimizer's copy; :class:`runner.optim.states.backup.OptimizerBackup`."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def step_as_saved(self) -> None: ...


class NotFiniteError(Exception):
    """A step's loss or gradients are not finite, and the step may not be skipped.

    Args:
        window: of the step.
        what: the loss, in words, and whether it is a gradient that is not finite.
    """

    def __init__(self, window: Window, what: str) -> None:
        super().__init__(what)
        self.window = window
        self.what = what


@dataclass
class _Pending:
    """A step whose verdict is under way."""

    window: Window
    loss: float
    stepped: bool
    scale: dict[str, Any]  # the loss scale's state before the step


class StageUpdate:
    """Ends the optimizer steps of stages that are updated together.

    Args:
        stages: of this rank.
        options: what the run fixes.
        update: the weights' part.
        stores: of those of the stages that keep several versions of their weights.
    """

    def __init__(
        self, stages: Iterable[int], options: EngineOptions, update: Update, stores: Iterable[WeightStore] = ()
    ) -> None:
        self.stages = frozenset(stages)
        self.update = update
        self.backup: Backup | None = None
        self.taken_back: list[TakenBack] = []
        self._options = options
        self._stores = tuple(stores)
        self._pending: _Pending | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the last step may yet be taken back."""
        return self._pending is not None

    def finish(self, window: Window, times: StepTimes) -> FinishedStep:
        """Update the weights; with post-validation before all ranks have agreed to it.

        Args:
            window: its loss and the stages' gradients are sums over all micro-batches and replicas.
            times: where seconds are noted.

        Raises:
            RunFailedError: the step has no weight.
            NotFiniteError: the step is neither finite nor to be skipped.
        """
        start = time.perf_counter()
        total, weight = window.loss.tolist()
        if weight <= 0:
            what = "no sample has a weight" if weight == 0 else f"the samples' weights add up to {weight}"
            raise RunFailedError(f"step {window.step}: {what}; the weights are those of the step before")
        scale = self.update.scale.value if self.update.scale.is_dynamic else None
        loss_is_finite = math.isfinite(total) and math.isfinite(weight)
        if loss_is_finite:
            self.update.open(weight)
        agreed = time.perf_counter()
        speculative = self._options.post_validation and loss_is_finite
        if speculative:
            verdict = self._speculate(window, total / weight)
        else:
            verdict = self.update.verdict() if loss_is_finite else Verdict(finite=False)
            agreed = time.perf_counter()
            self._conclude(window, total / weight, verdict)
        times.waited_at_step += agreed - start
        times.optimizer += time.perf_counter() - agreed
        skipped = not verdict.finite and not speculative
        norm = self.update.norm_of(verdict)
        return FinishedStep(window.step, total / weight, norm, window.stops > 0, skipped, scale)

    def settle(self, times: StepTimes, begun: Callable[[], None] | None = None) -> bool:
        """Wait for the verdict on the last step, and take the step back where it says so.

        Args:
            times: where seconds are noted.
            begun: called before anything is taken back: drops what the next window has begun.

        Returns:
            whether the step was taken back, so that the next window's beginning has to run again.

        Raises:
            NotFiniteError: the step is neither finite nor to be skipped.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        start = time.perf_counter()
        verdict = self.update.verdict()
        times.waited_at_step += time.perf_counter() - start
        if verdict.finite and verdict.factor == 1.0:
            assert pending.stepped  # a rank's own norm is no larger than all ranks' together
            self.update.close()
            return False
        if begun is not None:
            begun()
        self._take_back(pending, verdict)
        return True

    def _speculate(self, window: Window, loss: float) -> Verdict:
        """Update at once if this rank's own gradients allow it; the norm is not known yet."""
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
        """Undo the update, if there was one, and do what the verdict says with the same gradients."""
        assert self.backup is not None
        self.taken_back.append(TakenBack(pending.window.step, skipped=not verdict.finite, grad_norm=verdict.norm))
        if pending.stepped:
            self.backup.restore()
            self.update.scale.load_state_dict(pending.scale)
        step = self.backup.step_as_saved if pending.stepped else None
        self._conclude(pending.window, pending.loss, verdict, step)

    def _conclude(self, window: Window, loss: float, verdict: Verdict, step: Callable[[], None] | None = None) -> None:
        """Update or skip, as the verdict says.

        Raises:
            NotFiniteError: the step is neither finite nor to be skipped.
        """
        scale = self.update.scale
        if verdict.finite:
            for store in self._stores:
                store.before_step(window.step)
            self.update.apply(verdict.factor, step)
            for store in self._stores:
                store.after_step()
            self.update.close()
            scale.succeeded()
            return
        self.update.close()
        if scale.overflowed() or self._options.skip_nonfinite:
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss}, but a gradient is not finite"
        raise NotFiniteError(window, what)
