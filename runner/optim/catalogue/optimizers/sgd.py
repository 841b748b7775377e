"""Torch's gradient descent."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import OptimizerKind

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["SGD"]


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import SGD as TorchSGD

    return TorchSGD(parameters, lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay)


SGD = OptimizerKind(
    name="sgd",
    description="gradient descent, with `optimizer.momentum` where asked for",
    cost="0, with momentum 1",
    make=_make,
    values=0.0,
    temporaries=1,
    reads=("momentum",),
    decoupled=False,
    elementwise=True,
    by_weight=True,
    classes=("torch.optim.sgd.SGD",),
)
