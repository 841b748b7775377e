"""A callback that changes one bit of a weight in one of its copies, after a step, before that step is saved."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback


class Flips(Callback):
    def __init__(self, rank: int, step: int) -> None:
        self._rank, self._step = rank, step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        if (trainer.global_rank, trainer.global_step) == (self._rank, self._step):
            weight = next(iter(trainer.optimizers[0].param_groups[0]["params"]))
            weight.data.view(-1).view(torch.int32)[0] ^= 1
