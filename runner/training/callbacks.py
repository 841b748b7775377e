"""Callbacks that the runner adds to Lightning's loop: the record, the prediction, validations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from runner.engine.engine import Engine, FinishedStep
from runner.record import StepLog
from runner.strategy.pipeline import EngineStrategy
from runner.training.lightning_module import TrainedModule
from runner.training.measure.shared import SharedFigures
from runner.training.resume import History

__all__ = ["BeforeFirstStep", "MissedValidation", "StepClock", "Validations"]


def _strategy(trainer: pl.Trainer) -> EngineStrategy:
    assert isinstance(trainer.strategy, EngineStrategy)
    return trainer.strategy


def _batches(trainer: pl.Trainer) -> int:
    """The batches that the run has taken, with those before it was continued."""
    taken: int = trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
    return taken


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
        samples_of: the samples of a step, by the number of the batch from the beginning of the run, from 0.
        before: the steps that a continued run has taken already.
        figures: what the ranks tell one another.
        loading: returns the seconds for which batches were waited for, since the last call.

    Attributes:
        walls: seconds of each step that this process has taken, in order.
        samples: samples of each of them.
        loads: seconds of each of them in which its batch, or the next one, was waited for.
        calls: seconds of each of them in callbacks and loggers after the step.
        loops: seconds of each of them in neither its batch nor the engine.
    """

    def __init__(
        self,
        log: StepLog | None,
        samples_of: Callable[[int], int],
        before: History,
        figures: SharedFigures,
        loading: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.walls: list[float] = []
        self.loads: list[float] = []
        self.calls: list[float] = []
        self.loops: list[float] = []
        self._loading = loading
        self._in_callbacks = 0.0  # of the step before, which are part of this step's wall time
        self.samples: list[int] = []
        self.figures = figures
        self._losses: list[float] = []  # losses of the steps that have ended; more steps may have begun
        self._before = before
        self._log = log
        self._samples_of = samples_of
        self._mark = 0.0
        self._row: tuple[int, dict[str, float]] = (0, {})  # a step, and what is logged of it
        self.layers_moved: dict[str, Any] | None = None  # what the record says of layers that have moved before a step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start()

    def history(self, module: TrainedModule) -> History:
        """All steps so far, with the validations of the module."""
        losses, seconds = [*self._before.loss, *self._losses], [*self._before.seconds, *self.walls]
        return History.of(losses, seconds, module.val_losses, module.val_metrics)

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients of the last step that has ended, where it is computed."""
        return self._row[1].get("grad_norm")

    @property
    def loss(self) -> float | None:
        """Loss of the last step that has ended in this process."""
        return self._losses[-1] if self._losses else None

    def start(self) -> None:
        """Start the time of the next step now."""
        self._mark = time.perf_counter()
        self._in_callbacks = 0.0
        self._loading()

    def callbacks_ended(self) -> None:
        """Note that the last callback after a step has returned."""
        self._in_callbacks = time.perf_counter() - self._mark

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        strategy = _strategy(trainer)
        engine = strategy.engine
        if engine is None:
            return
        strategy.require_step()
        now = time.perf_counter()
        self.walls.append(now - self._mark)
        self.loads.append(self._loading())
        self.calls.append(self._in_callbacks)
        self.loops.append(self.walls[-1] - self.loads[-1] - strategy.submit_seconds)
        self._mark, self._in_callbacks = now, 0.0
        self.samples.append(self._samples_of(_batches(trainer) - 1))
        assert strategy.meter is not None
        self.figures.update(engine.timeline.steps, strategy.meter.peak_bytes)
        finished = self._note(strategy.take_finished(), engine)
        speed = self.samples[-1] / self.walls[-1]
        row = {"lr": strategy.rates[0], "samples_per_second": speed, "bubble": self.figures.bubble}
        if finished is not None:
            row |= {"loss": finished.loss, "grad_norm": finished.grad_norm, "loss_scale": finished.loss_scale}
        self._row = trainer.global_step, {name: value for name, value in row.items() if value is not None}
        for name, value in self._row[1].items():
            pl_module.log(name, value, batch_size=1)

    def write_row(self, trainer: pl.Trainer) -> None:
        """Write the figures of the last step to the loggers before Lightning does, which is after all callbacks.

        A checkpoint of the step is written by a callback. A process that ended in between would leave a log without the
        step, and a resumed run does not take it again.
        """
        step, row = self._row
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by another class of Lightning
        if not row or step != trainer.global_step or step % every:
            return
        # Lightning keeps what it logs in the format of tensors.
        rounded = {name: torch.tensor(value, dtype=torch.get_default_dtype()).item() for name, value in row.items()}
        for logger in trainer.loggers:
            logger.log_metrics(rounded | {"epoch": trainer.current_epoch}, step - 1)
            logger.save()

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
            if self.layers_moved is not None:
                extra["layers_moved"], self.layers_moved = self.layers_moved, None
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
        missing_after: see :class:`MissedValidation`.
    """

    def __init__(self, are_due: Callable[[int], bool], missing_after: int | None = None) -> None:
        self._are_due = are_due
        self._missing_after = missing_after
        self._last: int | None = None

    def on_load_checkpoint(self, trainer: pl.Trainer, *args: Any) -> None:
        """Keep Lightning from leaving at once where no step is left: the validation of the last one is to come."""
        if self._missing_after == trainer.max_steps:
            self._last = trainer.max_steps
            trainer.fit_loop.epoch_loop.max_steps = self._last + 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._last is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._last

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True
        elif _strategy(trainer).stopped and not self._are_due(trainer.global_step):
            trainer.limit_val_batches = 0


class MissedValidation(Callback):
    """Validates before the first step where a resumed run goes on from a step whose validation did not come.

    A failure between a step and its validation saves the step. Place it after callbacks that must have begun.

    Args:
        after: that step; None if nothing is missing.
    """

    def __init__(self, after: int | None) -> None:
        self._after = after

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what Lightning's loop does after a step."""
        if self._after is None:
            return
        connector = trainer._logger_connector
        is_first = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = is_first
