"""LightningModules that say nothing but a ``training_step``."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset


class Plain(pl.LightningModule):
    """The step computes all by itself; it logs, and asks a metric."""

    of_class: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 9), nn.Linear(9, 9), nn.Linear(9, 3)
        self.register_buffer("of_class", torch.tensor([1.0, 2.0, 0.5]))
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.seen: list[Tensor] = []

    def scores(self, given: Tensor) -> Tensor:
        wide = torch.tanh(self.first(given))
        made: Tensor = self.last(wide + torch.tanh(self.second(wide)))
        return made

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        given, target = batch
        scores = self.scores(given)
        self.log_dict({"accuracy": self.accuracy(scores.softmax(-1), target), "mean": scores.mean()})
        each = functional.cross_entropy(scores, target, weight=self.of_class, reduction="none")
        return {"loss": each.sum() / given.size(0), "scores": scores.detach()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Weighted(Plain):
    """A mean over what counts, with its weight beside it."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        given, target = batch
        counts = (target > 0).float()
        each = functional.cross_entropy(self.scores(given), target, reduction="none")
        return {"loss": (each * counts).sum() / counts.sum(), "weight": counts.sum()}


class Counts(Plain):
    """It asks the batch for its length, to compute with it and to log."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        given, target = batch
        loss = functional.cross_entropy(self.scores(given), target, reduction="sum") / len(given)
        self.log("train_loss", loss, batch_size=len(target), prog_bar=True)
        return {"loss": loss, "count": len(given)}


class Loops(Plain):
    """It goes over the samples one by one."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        given, target = batch
        each = [functional.cross_entropy(self.scores(given[i]), target[i]) for i in range(given.shape[0])]
        return torch.stack(each).mean()


class Rebuilds(Plain):
    """It has a forward, and no use for the target."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(3, 5)

    def forward(self, given: Tensor) -> Tensor:
        made: Tensor = self.back(torch.tanh(self.scores(given)))
        return made

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return functional.mse_loss(self(batch[0]), batch[0])


class Logs(Plain):
    """It logs what a trace can keep, and what it cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ReLU(inplace=True))  # type: ignore[assignment]
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
        self.each = torchmetrics.F1Score(task="multiclass", num_classes=3, average="none")  # three values
        self.ranks = torchmetrics.AUROC(task="multiclass", num_classes=3)  # keeps all samples

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        scores = self.scores(batch[0])
        loss = functional.cross_entropy(scores, batch[1])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        self.log("hits", (scores.argmax(-1) == batch[1]).float().mean(), on_epoch=True)
        self.log("by_class", (scores.softmax(-1) * self.of_class).mean())
        self.log("inside", self.first(batch[0]).mean())
        self.log("most", scores.max(), reduce_fx="max")
        self.log("value", loss.item())
        self.log("accuracy", self.accuracy(scores, batch[1]))
        self.log("silent", self.f1)
        self.log("each", self.each(scores, batch[1]))
        self.log("all", self.ranks(scores.softmax(-1), batch[1]))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self.scores(batch[0])
        self.log_dict({"val_hits": (scores.argmax(-1) == batch[1]).float().mean(), "gap": scores.std()})
        self.f1.update(scores, batch[1])
        self.log("val_f1", self.f1)
        self.log("val_all", self.ranks(scores.softmax(-1), batch[1]))
        self.log("noise", torch.rand_like(scores).mean())


class LogsNumber(Logs):
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_number", batch_idx + self.current_epoch)


class ReadsEpoch(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return self.scores(batch[0]).square().mean() * (1 + self.current_epoch)


class ReadsNumber(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.scores(batch[0]).square().mean()
        return loss if batch_idx % 2 else 2 * loss


class Remembers(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.seen.append(self.scores(batch[0]).detach())
        return functional.cross_entropy(self.scores(batch[0]), batch[1])


class EmbedsTarget(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.named = nn.Embedding(3, 3)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return functional.mse_loss(self.scores(batch[0]), self.named(batch[1]))


class DrawsWithTarget(Plain):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        wanted = functional.one_hot(batch[1], 3).float()
        return functional.mse_loss(self.scores(batch[0]), wanted + 0.1 * torch.randn_like(wanted))


class Reads(TensorDataset):
    """Its code asks for the values of tensors."""

    def __getitem__(self, index: Any) -> Any:
        given, target = super().__getitem__(index)  # type: ignore[no-untyped-call]
        return (given, target) if given.isfinite().all() else (torch.zeros_like(given), target)


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return Reads(torch.randn(23, 5, generator=generator), torch.randint(0, 3, (23,), generator=generator))
