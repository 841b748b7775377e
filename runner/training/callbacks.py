"""Callbacks that the runner adds to Lightning's loop: the record, the prediction, validations, progress."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, RichProgressBar

from runner.engine.engine import Engine, FinishedStep
from runner.record import StepLog
from runner.strategy.pipeline import EngineStrategy
from runner.training.module import LayersModule
from runner.training.resume import History

__all__ = ["BeforeFirstStep", "ProgressBar", "ProgressLines", "StepClock", "Validations", "progress"]

logger = logging.getLogger(__name__)

_LINES_PER_RUN = 20


def _strategy(trainer: pl.Trainer) -> EngineStrategy:
    assert isinstance(trainer.strategy, EngineStrategy)
    return trainer.strategy


class BeforeFirstStep(Callback):
    """Calls a function on every rank when everything is set up, before the first step."""

    def __init__(self, function: Callable[[pl.Trainer], None]) -> None:
        self._function = function

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._function(trainer)


class StepClock(Callback):
    """Measures the wall time of every optimizer step, including the loop but not validation and checkpoints.

    It also logs the step, so it must stand before callbacks that show metrics.

    Args:
        log: where rank 0 writes.
        batch_size: samples per step.
        before: the steps that a continued run has taken already.

    Attributes:
        walls: seconds of each step that this process has taken, in order.
    """

    def __init__(self, log: StepLog | None, batch_size: int, before: History) -> None:
        self.walls: list[float] = []
        self._losses: list[float] = []  # losses of the steps that have ended; more steps may have begun
        self._before = before
        self._log = log
        self._batch_size = batch_size
        self._mark = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start()

    def history(self, val_losses: Sequence[Sequence[float]]) -> History:
        """All steps so far, with the validations of the module."""
        return History(
            (*self._before.loss, *self._losses),
            (*self._before.seconds, *self.walls),
            tuple((int(step), value) for step, value in val_losses),
        )

    def start(self) -> None:
        """Start the time of the next step now."""
        self._mark = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy = _strategy(trainer)
        engine = strategy.engine
        if engine is None:
            return
        now = time.perf_counter()
        self.walls.append(now - self._mark)
        self._mark = now
        times = engine.timeline.steps[-1]
        span = times.last_compute - times.first_compute
        pl_module.log("lr", trainer.optimizers[0].param_groups[0]["lr"], batch_size=1)
        pl_module.log("samples_per_second", self._batch_size / self.walls[-1], batch_size=1)
        if span > 0:
            pl_module.log("bubble", 1.0 - times.compute / span, batch_size=1)
        finished = self._note(strategy.take_finished(), engine)
        if finished is None:
            return
        pl_module.log("loss", finished.loss, prog_bar=True, batch_size=1)
        if finished.grad_norm is not None:
            pl_module.log("grad_norm", finished.grad_norm, batch_size=1)
        if finished.loss_scale is not None:
            pl_module.log("loss_scale", finished.loss_scale, batch_size=1)

    def settle(self, strategy: EngineStrategy) -> None:
        """Note the steps that are still under way, too. All ranks must call it after the same step."""
        finished = strategy.take_finished(settled=True)
        if strategy.engine is not None:
            self._note(finished, strategy.engine)

    def _note(self, steps: Sequence[FinishedStep], engine: Engine) -> FinishedStep | None:
        """Write the steps that have ended; the last of them, if there is one."""
        for finished in steps:
            extra: dict[str, Any] = {"skipped": True} if finished.skipped else {}
            if engine.taken_back:
                extra["taken_back"] = [{"step": b.step + 1, "skipped": b.skipped} for b in engine.taken_back]
                engine.taken_back.clear()
            if finished.loss_scale is not None:
                extra["loss_scale"] = finished.loss_scale
            seconds = self.walls[len(self._losses)]
            self._losses.append(finished.loss)
            if self._log is not None:
                self._log.write(step=finished.step + 1, loss=finished.loss, seconds=seconds, **extra)
        return steps[-1] if steps else None

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.settle(_strategy(trainer))
        if self._log is not None:
            self._log.close()


class Validations(Callback):
    """Makes Lightning validate after the last step too, but not because a signal stops the run.

    When a run is asked to stop, Lightning validates once more. For the last step this is wanted. At a signal time is
    short, and a resumed run would have a validation that an uninterrupted run does not have.

    Args:
        are_due: whether a validation follows a step.
    """

    def __init__(self, are_due: Callable[[int], bool]) -> None:
        self._are_due = are_due

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True
        elif _strategy(trainer).stopped and not self._are_due(trainer.global_step):
            trainer.limit_val_batches = 0


class ProgressLines(Callback):
    """Logs a line of progress now and then, for output that is not a terminal."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        step, total = trainer.global_step, trainer.max_steps
        if trainer.is_global_zero and (step % max(1, total // _LINES_PER_RUN) == 0 or step == total):
            logger.info("step %d/%d  %s", step, total, _status(trainer))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: LayersModule) -> None:  # type: ignore[override]
        if trainer.is_global_zero and pl_module.val_losses:
            step, loss = pl_module.val_losses[-1]
            logger.info("step %d  val_loss %.4f", step, loss)


def _status(trainer: pl.Trainer) -> str:
    metrics = trainer.callback_metrics
    parts = [f"loss {float(metrics['loss']):.4f}"] if "loss" in metrics else []
    if "samples_per_second" in metrics:
        parts.append(f"{float(metrics['samples_per_second']):.1f} samples/s")
    if "bubble" in metrics:
        parts.append(f"bubble {float(metrics['bubble']):.3f}")
    meter = _strategy(trainer).meter
    if meter is not None:
        parts.append(f"peak {meter.peak_bytes / 2**20:.0f} MiB")
    return "  ".join(parts)


class ProgressBar(RichProgressBar):
    """Lightning's progress bar, with samples/s, this rank's measured bubble and its peak memory."""

    def __init__(self) -> None:
        super().__init__(refresh_rate=10, leave=True)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = dict(super().get_metrics(trainer, pl_module))
        metrics.pop("v_num", None)
        found = trainer.callback_metrics
        for name, shown in (("samples_per_second", "samples/s"), ("bubble", "bubble")):
            if name in found:
                metrics[shown] = f"{float(found[name]):.3g}"
        meter = _strategy(trainer).meter
        if meter is not None:
            metrics["peak MiB"] = f"{meter.peak_bytes / 2**20:.0f}"
        return metrics


def progress(enabled: bool, rank: int) -> list[Callback]:
    """The progress callback of a rank: a bar on a terminal, lines elsewhere, none for ranks other than 0."""
    if not enabled or rank != 0:
        return []
    return [ProgressBar()] if sys.stderr.isatty() else [ProgressLines()]
