"""A user's own script whose LightningModule lists no layers: the strategy is the only difference to one process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import F1Score

from runner.api import PipelineStrategy


class Ordinary(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)

    def forward(self, given: Tensor) -> Tensor:
        wide = torch.tanh(self.first(given))
        wide = wide + torch.tanh(self.second(wide))
        made: Tensor = self.last(wide)
        return made

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(self(batch[0]), batch[1])
        self.log("own", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stepwise(pl.LightningModule):
    """Its steps are all there is, and they log."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(
            nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(inplace=True), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
        )

        self.f1, self.val_f1 = (F1Score(task="multiclass", num_classes=3, average="macro") for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scores = self.body(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log_dict({"own": loss, "weight": next(self.body.parameters()).norm()})
        self.log("f1", self.f1(scores, batch[1]))
        self.log("accuracy", (scores.argmax(-1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self.body(batch[0])
        self.log("val_accuracy", (scores.argmax(-1) == batch[1]).float().mean())
        self.log("valid/top2", (scores.topk(2).indices == batch[1][:, None]).any(-1).float().mean())
        self.val_f1.update(scores, batch[1])
        self.log("val_f1", self.val_f1)
        self.log("inside", self.body[:3](batch[0]).mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(29, 6, generator=generator), torch.randint(0, 3, (29,), generator=generator))


def sets() -> tuple[TensorDataset, TensorDataset]:
    return samples(), samples()


if __name__ == "__main__":
    pl.seed_everything(0, verbose=False)
    strategy = PipelineStrategy(stages=2, schedule="1f1b", microbatches=2)
    off: dict[str, Any] = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    trainer = pl.Trainer(strategy=strategy, devices=2, accelerator="cpu", max_epochs=2, **off)
    model = {"Ordinary": Ordinary, "Stepwise": Stepwise}[sys.argv[2]]()
    trainer.fit(model, DataLoader(samples(), batch_size=8), DataLoader(samples(), batch_size=8))
    weights = strategy.lightning_module_state_dict()
    if trainer.is_global_zero:
        torch.save((weights, dict(trainer.callback_metrics)), Path(sys.argv[1]))
