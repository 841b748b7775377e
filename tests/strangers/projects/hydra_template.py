# mypy: ignore-errors
"""A LightningModule as templates have it: net and optimizer come from outside, metrics are modules of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification.accuracy import Accuracy


class SimpleDenseNet(nn.Module):
    def __init__(self, input_size: int = 64, lin1_size: int = 16, lin2_size: int = 16, output_size: int = 10) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(input_size, lin1_size),
            nn.BatchNorm1d(lin1_size),
            nn.ReLU(),
            nn.Linear(lin1_size, lin2_size),
            nn.BatchNorm1d(lin2_size),
            nn.ReLU(),
            nn.Linear(lin2_size, output_size),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.view(x.size(0), -1))


class LitModule(pl.LightningModule):
    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Any] | None,
        compile: bool,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=10) for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams["compile"] and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = self.hparams["optimizer"](params=self.trainer.model.parameters())
        if self.hparams["scheduler"] is None:
            return {"optimizer": optimizer}
        scheduler = self.hparams["scheduler"](optimizer=optimizer)
        watched = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": watched}


class InStages(LitModule):
    """The same with what a pipeline asks for: its layers, and its loss of their output."""

    def layers(self) -> list[nn.Module]:
        return [nn.Flatten(), *self.net.model]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.criterion(logits, target)


def build(scheduler: bool = True, stages: bool = False) -> LitModule:
    return (InStages if stages else LitModule)(
        net=SimpleDenseNet(),
        optimizer=partial(torch.optim.Adam, lr=0.01, weight_decay=0.0),
        scheduler=partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=10)
        if scheduler
        else None,
        compile=False,
    )


class Digits(pl.LightningDataModule):
    def __init__(self, train_val_test_split: tuple[int, int, int] = (24, 8, 8), batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train: Dataset[Any] | None = None
        self.data_val: Dataset[Any] | None = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self) -> int:
        return 10

    def prepare_data(self) -> None:
        pass

    def setup(self, stage: str | None = None) -> None:
        if self.trainer is not None:
            self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        if self.data_train is None:
            generator = torch.Generator().manual_seed(9)
            images = torch.randn(40, 1, 8, 8, generator=generator)
            whole = TensorDataset(images, torch.randint(0, 10, (40,), generator=generator))
            split = torch.Generator().manual_seed(42)
            self.data_train, self.data_val, self.data_test = random_split(
                whole, self.hparams["train_val_test_split"], generator=split
            )

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data_train, batch_size=self.batch_size_per_device, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.data_val, batch_size=self.batch_size_per_device, shuffle=False)

    def teardown(self, stage: str | None = None) -> None:
        pass


def data() -> Digits:
    return Digits()
