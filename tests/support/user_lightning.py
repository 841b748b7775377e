"""LightningModules as a user writes them: nothing of the runner. Its text is also written into a user's directory."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT, OptimizerLRScheduler, OptimizerLRSchedulerConfig
from torch import nn
from torch.nn import functional as F


class Whole(pl.LightningModule):
    """Everything its own: steps, optimizer, scheduler, hooks; and, for a pipeline, its layers and loss."""

    def __init__(self, dropout: float = 0.0, epochs: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)
        )
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)
        self.epochs = epochs
        self.called: list[int | str] = []

    def layers(self) -> list[nn.Module]:
        return list(self.net)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> STEP_OUTPUT:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.called.append(batch_idx)
        self.log("own_loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "more": 3}

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))
        self.log("accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def on_train_start(self) -> None:
        self.called.clear()

    def on_train_batch_end(self, outputs: STEP_OUTPUT, batch: Any, batch_idx: int) -> None:
        self.called.append("end")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim < 2 and p.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
        optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        interval = "epoch" if self.epochs else "step"
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


class Bare(pl.LightningModule):
    """A training step, and an optimizer without a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))

    def training_step(self, batch: list[torch.Tensor]) -> STEP_OUTPUT:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clips(Bare):
    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        pass


class ReturnsNothing(Bare):
    def training_step(self, batch: list[torch.Tensor]) -> None:
        super().training_step(batch)


class LineSearch(Bare):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return torch.optim.LBFGS(self.parameters())


class TwoOptimizers(Bare):
    def configure_optimizers(self) -> OptimizerLRScheduler:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[0], self.net[2])]


class Traced(pl.LightningModule):
    """A training step alone, with a skip; the optimizer is the request's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.middle = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> STEP_OUTPUT:
        hidden = torch.tanh(self.norm(self.first(batch[0])))
        return F.cross_entropy(self.head(torch.relu(self.middle(hidden)) + hidden), batch[1])


class Layered(Traced):
    """The same without the skip, as layers and a loss."""

    def layers(self) -> list[nn.Module]:
        return [self.first, self.norm, nn.Tanh(), self.middle, nn.ReLU(), self.head]

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)
