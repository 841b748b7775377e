"""A plain Lightning script that saves every few steps and goes on from its last checkpoint, as a user writes it."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from runner.recipes.faults.compare.callback import Kills
from runner.recipes.faults.compare.race import BATCH, RATE, Race, data, model

__all__ = ["main"]


class _Module(pl.LightningModule):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.net = model(seconds)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def main(path: str) -> None:
    """Train from the last checkpoint, if there is one, to the last step."""
    race = Race.load(path)
    folder = Path(race.folder, "checkpoints")
    saves = ModelCheckpoint(folder, every_n_train_steps=race.every, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=race.ranks,
        strategy="ddp",
        max_steps=race.steps,
        callbacks=[saves, Kills(path)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=race.folder,
    )
    last = folder / "last.ckpt"
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True)
    trainer.fit(_Module(race.seconds), loader, ckpt_path=str(last) if last.exists() else None)


if __name__ == "__main__":
    main(sys.argv[1])
