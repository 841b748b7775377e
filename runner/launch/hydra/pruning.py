"""Ends a trial whose validations are worse than those of the study's earlier trials, as an Optuna pruner decides.

Each rank of the trial's job asks the pruner after a validation. What it compares with are the records of the jobs
beside it that are complete, so that the job needs no connection to the study.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from runner.launch.hydra.pruner import PRUNED_FILE, PRUNERS
from runner.record import RunRecord

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["Pruning"]

_Direction = Literal["minimize", "maximize"]


class Pruning(Callback):
    """Ends the run where the pruner says so.

    Args:
        name: one of :data:`runner.launch.hydra.pruner.PRUNERS`.
        options: arguments of Optuna's class.
        direction: ``minimize`` or ``maximize``.
    """

    def __init__(self, name: str, options: Mapping[str, Any], direction: _Direction = "minimize") -> None:
        import optuna

        self._pruner = getattr(optuna.pruners, PRUNERS[name])(**options)
        self._direction = direction

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Ask the pruner; nothing is ended in the last step."""
        job = Path(trainer.default_root_dir)
        values = {int(step): float(value) for step, value in getattr(pl_module, "val_losses", ())}
        if trainer.global_step < trainer.max_steps and self.should_prune(job, values):
            trainer.should_stop = True
            (job / PRUNED_FILE).touch()

    def should_prune(self, job: Path, values: Mapping[int, float]) -> bool:
        """Whether the trial of the job in this directory shall end.

        Args:
            job: its directory.
            values: the losses of its validations so far, by step.
        """
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Optuna says of its own experiments
            optuna.logging.set_verbosity(logging.ERROR)
            study = optuna.create_study(direction=self._direction, pruner=self._pruner)
            for trial in _complete_trials(job):
                study.add_trial(trial)
            own = study.ask()
            for step, value in values.items():
                own.report(value, step)
            return bool(own.should_prune())


def _complete_trials(job: Path) -> Iterator[FrozenTrial]:
    """The trials of the jobs beside this one that went to their end, with the values of their validations."""
    from optuna.trial import create_trial

    for directory in sorted(job.parent.iterdir()):
        if directory == job or (directory / PRUNED_FILE).exists():
            continue
        try:
            record = RunRecord.load(directory)
        except (OSError, ValueError):  # no job, or one that has not begun
            continue
        if record.status == "ok" and record.val_loss:
            values = {int(step): float(value) for step, value in record.val_loss}
            yield create_trial(value=values[max(values)], intermediate_values=values)
