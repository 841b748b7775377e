"""A callback for Lightning's loop, and the runner's, which is the same: it kills ranks, and notes steps."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from runner.recipes.faults.compare.race import Race, begins, ended

__all__ = ["Kills"]


class Kills(pl.Callback):
    """Calls :func:`begins` and :func:`ended`.

    Args:
        race: the file of the :class:`Race`.
    """

    def __init__(self, race: str) -> None:
        self._race = Race.load(race)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        begins(self._race, trainer.global_rank, trainer.global_step + 1)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        ended(self._race, trainer.global_rank, trainer.global_step)
