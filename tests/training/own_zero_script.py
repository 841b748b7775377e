"""A user's own script with ZeRO: several fits in one process, one of which goes on from another's checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from own_script import Model, data
from torch.utils.data import DataLoader

from runner.api import OffloadConfig, ZeroConfig, ZeroStrategy

BOTH = OffloadConfig(optimizer="cpu", parameters="cpu")


class PlainRate(Model):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.found.append(float(trainer.callback_metrics["loss"]))


def fit(folder: Path, name: str, strategy: ZeroStrategy, epochs: int, start: Path | None = None) -> Path:
    losses = Losses()
    trainer = pl.Trainer(
        strategy=strategy, devices=2, accelerator="cpu", max_epochs=epochs, gradient_clip_val=0.5, callbacks=[losses],
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder / name,
    )  # fmt: skip
    validation = DataLoader(data(10, 2), batch_size=5)
    trainer.fit(PlainRate(), DataLoader(data(32, 1), batch_size=4, shuffle=True), validation, ckpt_path=start)
    found: dict[str, Any] = {"losses": losses.found, "weights": strategy.lightning_module_state_dict()}
    found["val_loss"] = float(trainer.callback_metrics["val_loss"])
    if trainer.is_global_zero:
        torch.save(found, folder / f"{name}.pt")
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)
    return Path(trainer.checkpoint_callback.best_model_path)


def main(folder: Path) -> None:
    common: dict[str, Any] = {"data": 2, "microbatches": 2}
    fit(folder, "one", ZeroStrategy(ZeroConfig(stage=1), **common), 2)
    half = fit(folder, "three", ZeroStrategy(ZeroConfig(stage=3), BOTH, **common), 1)
    fit(folder, "goes_on", ZeroStrategy(ZeroConfig(stage=2), OffloadConfig(optimizer="cpu"), **common), 2, half)
    os._exit(0)  # Gloo's threads now and then abort in the interpreter's own teardown


if __name__ == "__main__":
    main(Path(sys.argv[1]))
