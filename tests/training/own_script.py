"""A user's own script: an ordinary LightningModule and Trainer, with the runner's strategy. Writes what it saw."""

from __future__ import annotations

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runner.api import PipelineStrategy, WeightAveraging


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))

    def layers(self) -> list[nn.Module]:
        return list(self.net)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Watch(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))

    def on_train_epoch_end(self, trainer: pl.Trainer, *args: object) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 3, (samples,), generator=generator)
    )


def main(folder: Path) -> None:
    watch, average = Watch(), WeightAveraging(0.5)
    strategy = PipelineStrategy(stages=2, schedule="1f1b", microbatches=4)
    trainer = pl.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=3,
        gradient_clip_val=0.5,
        callbacks=[watch, average, LearningRateMonitor(), EarlyStopping("val_loss", patience=9)],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        log_every_n_steps=1,
    )
    model = Model()
    training, validation = DataLoader(data(29, 1), batch_size=8, shuffle=True), DataLoader(data(10, 2), batch_size=8)
    trainer.fit(model, training, validation)
    saver = trainer.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    found: dict[str, Any] = {
        "losses": watch.losses,
        "rates": watch.rates,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "validate": trainer.validate(model, validation, verbose=False),
        "test": trainer.test(model, validation, verbose=False),
        "checkpoint": saver.best_model_path,
    }
    predictions = trainer.predict(model, validation)
    found["predictions"] = [part.tolist() if isinstance(part, torch.Tensor) else part for part in predictions or []]
    weights = strategy.lightning_module_state_dict()
    averages = average.whole(strategy)
    if trainer.is_global_zero:
        torch.save({"weights": weights, "averages": averages}, folder / "weights.pt")
    (folder / f"rank{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(found))


def threads() -> list[str]:
    """Names of the process's threads, also of those that Python does not know of."""
    return sorted(task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir())


def write_threads(folder: Path) -> None:
    (folder / f"threads{os.environ.get('LOCAL_RANK', '0')}.json").write_text(json.dumps(threads()))


if __name__ == "__main__":
    atexit.register(write_threads, Path(sys.argv[1]))  # registered first, it runs after all others
    main(Path(sys.argv[1]))
