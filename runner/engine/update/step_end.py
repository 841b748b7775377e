"""The end of a window: totals and sums are complete, the ranks agree on them, and the weights are updated or not.

With post-validation nobody waits for the agreement: a rank updates if its own gradients allow it, begins the next
window, and takes the update back, exactly, if another rank's gradients forbid it.

Source of the protocol: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 4. The opinions travel here in one
asynchronous all-gather instead of a chain of messages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from runner.engine.chains import Chains
from runner.engine.measure.nonfinite import Finding
from runner.engine.measure.timeline import Timeline
from runner.engine.options import EngineOptions, FinishedStep, TakenBack
from runner.engine.update.update import Update, Verdict
from runner.engine.window import Window
from runner.errors import RunFailedError

__all__ = ["Backup", "StepEnd"]


class Backup(Protocol):
    """What post-validation asks of an optimizer's copy; :class:`runner.optim.states.backup.OptimizerBackup`."""

    def save(self) -> None: ...

    def restore(self) -> None: ...

    def step_as_saved(self) -> None: ...


@dataclass
class _Pending:
    """A step whose verdict is under way."""

    window: Window
    loss: float
    stepped: bool
    scale: dict[str, Any]  # the loss scale's state before the step


class StepEnd:
    """Finishes the windows of one rank.

    Args:
        options: what the run fixes.
        update: the weights' part.
        chains: bring the totals.
        reductions: waits for the sums of the window's gradients over replicas and holders of tied weights.
        timeline: where seconds are noted.
        find_nonfinite: plays a window again and finds the first value that is not finite.
    """

    def __init__(
        self,
        *,
        options: EngineOptions,
        update: Update,
        chains: Chains,
        reductions: Callable[[Window], None],
        timeline: Callable[[], Timeline],
        find_nonfinite: Callable[[Window], Finding | None],
    ) -> None:
        self.backup: Backup | None = None
        self.taken_back: list[TakenBack] = []
        self._options = options
        self._update = update
        self._chains = chains
        self._finish_reductions = reductions
        self._timeline = timeline
        self._find_nonfinite = find_nonfinite
        self._pending: _Pending | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the last step may yet be taken back."""
        return self._pending is not None

    def finish(self, window: Window) -> FinishedStep:
        """Wait for the sums, then update; with post-validation before all ranks have agreed to it.

        Raises:
            RunFailedError: the step has no weight, or is neither finite nor to be skipped.
        """
        times = self._timeline().current
        start = time.perf_counter()
        self._chains.totals(window.loss)
        self._finish_reductions(window)
        total, weight, stop = window.loss.tolist()
        if weight <= 0:
            what = "no sample has a weight" if weight == 0 else f"the samples' weights add up to {weight}"
            raise RunFailedError(f"step {window.step}: {what}; the weights are those of the step before")
        scale = self._update.scale.value if self._update.scale.is_dynamic else None
        loss_is_finite = math.isfinite(total) and math.isfinite(weight)
        if loss_is_finite:
            self._update.open(weight)
        agreed = time.perf_counter()
        speculative = self._options.post_validation and loss_is_finite
        if speculative:
            verdict = self._speculate(window, total / weight)
        else:
            verdict = self._update.verdict() if loss_is_finite else Verdict(finite=False)
            agreed = time.perf_counter()
            self._conclude(window, total / weight, verdict)
        times.waited_at_step += agreed - start
        times.optimizer += time.perf_counter() - agreed
        skipped = not verdict.finite and not speculative
        return FinishedStep(window.step, total / weight, self._update.norm_of(verdict), stop > 0, skipped, scale)

    def settle(self, begun: Callable[[], None] | None = None) -> bool:
        """Wait for the verdict on the last step, and take the step back where it says so.

        Args:
            begun: called before anything is taken back: drops what the next window has begun.

        Returns:
            whether the step was taken back, so that the next window's beginning has to run again.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return False
        start = time.perf_counter()
        verdict = self._update.verdict()
        self._timeline().current.waited_at_step += time.perf_counter() - start
        if verdict.finite and verdict.factor == 1.0:
            assert pending.stepped  # a rank's own norm is no larger than all ranks' together
            self._update.close()
            return False
        if begun is not None:
            begun()
        self._take_back(pending, verdict)
        return True

    def _speculate(self, window: Window, loss: float) -> Verdict:
        """Update at once if this rank's own gradients allow it; the norm is not known yet."""
        assert self.backup is not None
        self._update.announce()
        own = self._update.own_verdict()
        allowed = own.finite and own.factor == 1.0
        self._pending = _Pending(window, loss, allowed, self._update.scale.state_dict())
        if allowed:
            self.backup.save()
            self._update.apply(1.0)
            self._update.scale.succeeded()
        return Verdict(own.finite)

    def _take_back(self, pending: _Pending, verdict: Verdict) -> None:
        """Undo the update, if there was one, and do what the verdict says with the same gradients."""
        assert self.backup is not None
        self.taken_back.append(TakenBack(pending.window.step, skipped=not verdict.finite, grad_norm=verdict.norm))
        if pending.stepped:
            self.backup.restore()
            self._update.scale.load_state_dict(pending.scale)
        step = self.backup.step_as_saved if pending.stepped else None
        self._conclude(pending.window, pending.loss, verdict, step)

    def _conclude(self, window: Window, loss: float, verdict: Verdict, step: Callable[[], None] | None = None) -> None:
        """Update or skip, as the verdict says.

        Raises:
            RunFailedError: the step is neither finite nor to be skipped.
        """
        scale = self._update.scale
        if verdict.finite:
            self._update.apply(verdict.factor, step)
            self._update.close()
            scale.succeeded()
            return
        self._update.close()
        if scale.overflowed() or self._options.skip_nonfinite:
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the loss is {loss}, but a gradient is not finite"
        found = self._find_nonfinite(window)
        where = f"first not finite: {found.what}" if found else "every layer was finite when the step ran again"
        raise RunFailedError(f"step {window.step}: {what}; {where}; the weights are those of the step before")
