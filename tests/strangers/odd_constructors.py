"""Models whose constructors copy, measure and hook, as lightning-hydra-template, EMA and distillation projects do."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

WIDTH = 6


def _block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Held(nn.Module):
    """A net, and what else a project keeps beside it."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.others, self.seen = nn.ModuleList(others), dict[str, Any]()

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.net(value)
        return made


class OwnSteps(pl.LightningModule):
    """With a metric for each of its loops."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, WIDTH), copy.deepcopy(_block()), nn.Linear(WIDTH, 3))
        self.train_accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.best = torchmetrics.MaxMetric()
        self.losses = torchmetrics.MeanMetric()

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.net(value)
        return made

    def training_step(self, batch: Any, _: int) -> Tensor:
        value, target = batch
        loss = nn.functional.cross_entropy(self(value), target)
        self.losses(loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def copied() -> nn.Sequential:
    block = _block()
    return nn.Sequential(nn.Linear(4, WIDTH), *(copy.deepcopy(block) for _ in range(3)), nn.Linear(WIDTH, 3))


def metric() -> nn.Module:
    accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
    score = torchmetrics.F1Score("multiclass", num_classes=3)
    return Held(accuracy, torchmetrics.MetricCollection({"accuracy": accuracy.clone(), "score": score}))


def averaged() -> nn.Module:
    return Held(AveragedModel(_block()).requires_grad_(False))


def pickled() -> nn.Module:
    """A copy through ``copy.copy``, one of a tensor, and one of an optimizer's state."""
    made = Held(copy.copy(_block()))
    made.register_buffer("count", copy.deepcopy(torch.tensor(3)))
    made.register_buffer("scale", torch.tensor([1.0, 2.0]).new_tensor([3.0]))
    return made


def read() -> nn.Module:
    """Reads values of its weights."""
    made = Held(nn.Linear(2, 2))
    made.seen["mean"] = float(made.net.weight.detach().mean())
    made.seen["array"] = np.asarray(made.net.bias.detach().numpy()).copy()
    return made


def hooked() -> nn.Module:
    made = copied()
    seen: list[float] = []
    made[1].register_forward_hook(lambda module, given, output: seen.append(1.0))
    made[2].register_full_backward_hook(lambda module, given, output: None)
    return made


def stored() -> nn.Module:
    """Puts its state through a file's bytes, as a project does that loads a checkpoint in the constructor."""
    import io

    made, buffer = Held(_block()), io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    made.load_state_dict(torch.load(buffer, weights_only=True))
    return made


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator))
