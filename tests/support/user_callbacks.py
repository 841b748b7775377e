"""Lightning callbacks as a user writes them. Its text is also written into a user's directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch


def constant(output: torch.Tensor, target: torch.Tensor) -> float:
    """A metric that never becomes better."""
    return 1.0


class StopOnOneRank(pl.Callback):
    """The last rank alone asks for the end, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            trainer.should_stop = True


class Seen(pl.Callback):
    """What each rank sees, in a file."""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_validation_end_(trainer)

    def on_validation_end_(self, trainer: pl.Trainer) -> None:  # a name of its own, as one hook calls it
        names = sorted(trainer.callback_metrics)
        Path(f"seen_{trainer.global_rank}.txt").write_text(" ".join(names))

    def on_validation_end_log(self) -> None:
        """Is for others to call."""


class Misspelt(pl.Callback):
    """Would never be called."""

    def on_validation_ned(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = True


class NoCallback:
    pass
