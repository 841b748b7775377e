"""Decides when a run is saved and which checkpoints are kept, and restores a run from a checkpoint."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from runner.checkpoint.file import (
    checkpoint_files,
    checkpoint_name,
    remove_checkpoint,
    remove_leftovers,
    set_aside,
    write_checkpoint,
)
from runner.checkpoint.parts import write_part
from runner.checkpoint.plain import Plain
from runner.config.schema import CheckpointConfig
from runner.engine.update.stage_update import NotFiniteError
from runner.errors import RunFailedError
from runner.optim.states.settings import settings_of
from runner.strategy.checkpoints_by_name import num_bytes
from runner.strategy.pipeline import EngineStrategy
from runner.training.averaging import AVERAGE
from runner.training.background import Background
from runner.training.measure.spent import SAVING, Spent
from runner.training.random_state import set_random_state
from runner.training.resume import ENTRY, Progress, follow_config, loop_state
from runner.training.saved_state import check_states, guarded_hooks, try_save

__all__ = ["Checkpoints", "SaveFirst"]

logger = logging.getLogger(__name__)

_Content = dict[str, Any]


class Checkpoints(Callback):
    """Saves every so many steps or seconds and at the last step, deletes old checkpoints, and restores a resumed run.

    Rank 0 looks at the clock, and asks all ranks through the engine, so that they save after the same step. A
    checkpoint that is due by time alone is kept until the next one of either kind is complete, and does not count
    among those that ``checkpoint.keep`` keeps.

    Args:
        directory: made on first use.
        config: when and how to save, and what to keep.
        validates: whether a validation follows a step; the checkpoint is then saved after the validation.
        progress: the progress of the run; called on every rank.
        resumed: the progress from which the run continues.
        follows_config: whether a resumed optimizer takes the request's settings; else it keeps its own.
        saved: called after each save.
        spent: counts the seconds of saves.
        val_losses: ``[step, value]`` pairs of the run so far.
        target: the function that makes the model.

    Attributes:
        failed: why the state after the last step could not be saved; None if it was, or if that is to come.
        is_over: whether all ranks have taken the run's last step and saved, or tried to.
        missing: what checkpoints are without, because it could not be saved: why, by place.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        validates: Callable[[int], bool],
        progress: Callable[[pl.Trainer], Progress],
        resumed: Progress | None,
        follows_config: bool,
        saved: Callable[[], None],
        spent: Spent,
        val_losses: Callable[[], Iterable[Sequence[float]]],
        target: str | None,
    ) -> None:
        self.failed: RunFailedError | None = None
        self.is_over = False
        self.missing: dict[str, str] = {}
        self._directory = directory
        self._config = config
        self._validates = validates
        self._progress = progress
        self._resumed = resumed
        self._follows_config = follows_config
        self._saved = saved
        self._spent = spent
        self._val_losses = val_losses
        self._target = target
        self._has_tried = not config.try_first
        self._is_first = config.try_first
        self._ends = False
        self._start = resumed.step if resumed is not None else 0
        self._files = {step: path for step, path in checkpoint_files(directory).items() if step <= self._start}
        self._by_time: set[int] = set()  # steps of checkpoints that were due by time or by a failure alone
        self._saved_at = time.monotonic()
        self._is_asked = False
        self._background = Background()
        self._requested: list[list[dict[str, Any]]] = []  # settings of the optimizers before a checkpoint is loaded

    @property
    def newest(self) -> Path | None:
        return self._files[max(self._files)] if self._files else None

    @property
    def best(self) -> Path | None:
        """The checkpoint with the lowest validation loss, among those that are kept for it."""
        ranked = self._best()
        return self._files[ranked[0]] if ranked and self._config.keep_best else None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nobody writes yet. A run that has no step left comes to no later hook."""
        if trainer.is_global_zero:
            remove_leftovers(self._directory)

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: _Content) -> None:
        if self._resumed is not None:
            checkpoint["loops"] = loop_state(trainer, self._resumed, validates=self._validates)
            self._requested = [settings_of(optimizer) for optimizer in trainer.optimizers]

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: _Content) -> None:
        checkpoint[ENTRY] = self._progress(trainer).to_entry()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the random state just before the first step: earlier code has drawn random numbers."""
        if trainer.is_global_zero:
            for step, path in checkpoint_files(self._directory).items():
                if step > self._start:  # the run passed it over as damaged; what is newer is never deleted
                    logger.warning("%s is kept as %s", path.name, set_aside(path).name)
        self._saved_at = time.monotonic()
        if self._resumed is not None:
            if self._follows_config:
                follow_config(trainer, self._requested)
            set_random_state(self._resumed.random_of(trainer.global_rank))

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """Try a save before the first step, when all hooks at the start of the training have been called."""
        if not self._has_tried:
            self._has_tried = True
            path = self._directory / checkpoint_name(trainer.global_step)
            with self._spent.within(SAVING), _strategy(trainer).patient(self._config.timeout_seconds):
                try_save(trainer, self._config, self._target, path)
            self._saved()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._background.check()
        if self._is_first:
            self._is_first = False
            check_states(trainer, self._target)
        if not self._validates(trainer.global_step):
            self._save_if_due(trainer)
        self._look_at_clock(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_if_due(trainer)

    def _save_if_due(self, trainer: pl.Trainer) -> None:
        engine = _strategy(trainer).engine
        if self._is_due(trainer.global_step):
            self._save(trainer)
        elif engine is not None and engine.saves and trainer.global_step < trainer.max_steps:
            self._by_time.add(trainer.global_step)
            self._save(trainer)

    def _look_at_clock(self, trainer: pl.Trainer) -> None:
        """Ask for a save if the last one is too long ago."""
        seconds, engine = self._config.every_seconds, _strategy(trainer).engine
        if seconds is None or engine is None or not trainer.is_global_zero or self._is_asked:
            return
        if time.monotonic() - self._saved_at >= seconds:
            self._is_asked = True
            engine.request_save()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._save_last(trainer)

    def steps_end(self) -> None:
        """Note that all ranks have left the loop over steps: whatever happens now on this rank, they save."""
        self._ends = True

    def _save_last(self, trainer: pl.Trainer) -> None:
        """Save the state after the last step; if that fails, go on, so that at least the weights are written."""
        try:
            self._save(trainer)
            if self._config.asynchronous:
                self._background.wait()
        except RunFailedError as error:
            logger.error("%s", error)
            self.failed = error
        if self._config.asynchronous:
            with _strategy(trainer).patient(self._config.timeout_seconds):
                is_whole = trainer.strategy.reduce_boolean_decision(self.failed is None, all=True)
            if is_whole:
                self._remove_old(trainer)
        self.is_over = True

    def save_after_failure(self, trainer: pl.Trainer, exception: BaseException) -> None:
        """Save the steps before one that has failed, if their state is whole.

        It is where the rank is alone, where all ranks end at the same step because it is not finite, and where they
        have left the loop over steps. Elsewhere the other ranks are at some action of theirs, and would not take part.
        """
        step = trainer.global_step
        if not isinstance(exception, Exception) or self.is_over or not self._directory.parent.is_dir():
            return  # a directory that was removed must not come back with a checkpoint alone
        try:
            if self._ends:
                self._save_last(trainer)
            elif step in self._files or step <= self._start:
                return
            elif _strategy(trainer).give_up_step(together=isinstance(exception.__cause__, NotFiniteError)):
                self._by_time.add(step)
                self._save(trainer)
                self._background.wait()
            else:
                return
            if self.failed is None:
                logger.warning("saved after step %d, the last before the failure", step)
        except Exception as error:  # what ended the run must be told, not what came of it
            logger.warning("step %d could not be saved after the failure: %s", step, error)

    def _is_due(self, step: int) -> bool:
        every = self._config.every
        return every is not None and step % every == 0

    def _save(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        if step in self._files:
            return
        path = self._directory / checkpoint_name(step)
        with self._spent.within(SAVING), _strategy(trainer).patient(self._config.timeout_seconds):
            self._save_as(trainer, path, step)
        self._saved_at, self._is_asked = time.monotonic(), False
        self._saved()

    def _save_as(self, trainer: pl.Trainer, path: Path, step: int) -> None:
        if self._config.asynchronous:
            self._wait_for_all_ranks(trainer)
            self._remove_old(trainer)
            self._start_saving(trainer, path)
            self._files[step] = path
        else:
            self._write_whole(trainer, path)
            self._files[step] = path
            self._remove_old(trainer)

    def _write_whole(self, trainer: pl.Trainer, path: Path) -> None:
        """Save in one file; if rank 0 cannot write it, it raises when the other ranks have ended the save, too."""
        failed: list[RunFailedError] = []

        def write(found: Plain, path: Path) -> None:
            try:
                write_checkpoint(found.content, path)
            except RunFailedError as error:
                failed.append(error)

        with _strategy(trainer).written_by(write):
            self._dump(trainer, path)
        if failed:
            raise failed[0]

    def _dump(self, trainer: pl.Trainer, path: Path) -> None:
        strategy = _strategy(trainer)
        with guarded_hooks(trainer, strategy.lose):
            trainer.save_checkpoint(path, weights_only=False)
        for lost in strategy.take_lost():
            if lost.place not in self.missing:
                logger.warning("step %d is saved without %s: %s", trainer.global_step, lost.place, lost.why)
            self.missing[lost.place] = lost.why

    def _start_saving(self, trainer: pl.Trainer, path: Path) -> None:
        """Copy what is to be saved, and write it in a thread while the run continues."""
        strategy = _strategy(trainer)
        with strategy.in_parts(partial(self._start_writing, strategy, path)):
            self._dump(trainer, path)

    def _start_writing(self, strategy: EngineStrategy, path: Path, content: _Content) -> None:
        copied = num_bytes([content.get(key) for key in ("state_dict", "optimizer_states", AVERAGE)])
        assert strategy.meter is not None
        strategy.meter.hold_copies(copied)
        self._background.start(partial(write_part, content, path, strategy.global_rank, strategy.world_size))

    def _wait_for_all_ranks(self, trainer: pl.Trainer) -> None:
        """Wait until the newest save is complete on all ranks, so that older ones may be deleted."""
        self._background.wait()
        trainer.strategy.barrier()

    def _remove_old(self, trainer: pl.Trainer) -> None:
        """Delete checkpoints that need not be kept; call it only after a newer one is complete."""
        regular = sorted(self._files.keys() - self._by_time)
        kept = {*regular[-self._config.keep :], *self._best()[: self._config.keep_best], max(self._files, default=0)}
        for step in self._files.keys() - kept:
            path = self._files.pop(step)
            if trainer.is_global_zero:
                remove_checkpoint(path)

    def _best(self) -> list[int]:
        """The steps of checkpoints with a validation, lowest loss first; a loss that is not finite is never good."""
        seen = {int(step): value for step, value in self._val_losses() if int(step) in self._files}
        losses = {step: value for step, value in seen.items() if math.isfinite(value)}
        return sorted(losses, key=lambda step: (losses[step], -step))


def _strategy(trainer: pl.Trainer) -> EngineStrategy:
    assert isinstance(trainer.strategy, EngineStrategy)
    return trainer.strategy


class SaveFirst(Callback):
    """Lets :class:`Checkpoints` save before the callbacks of users that fail after the last step, or at a failure.

    Place it before them; :class:`Checkpoints` itself saves when they have seen a step.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.should_stop or trainer.global_step >= trainer.max_steps:
            self._checkpoints.steps_end()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._checkpoints.steps_end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._checkpoints.save_after_failure(trainer, exception)
