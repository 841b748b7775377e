"""Torch's Adam and AdamW, and the optimizer that a LightningModule defines itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import BETAS, OptimizerKind, common_settings
from runner.optim.catalogue.motion import ADAM_MOTION

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["ADAM", "ADAMW", "AUTO"]


def _adamw(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(parameters, **common_settings(section))


def _adam(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import Adam

    decoupled = bool(section.decoupled_weight_decay)
    return Adam(parameters, **common_settings(section), decoupled_weight_decay=decoupled)


ADAMW = OptimizerKind(
    name="adamw",
    description="Adam with decoupled weight decay",
    cost="2",
    make=_adamw,
    values=2.0,
    reads=BETAS,
    decoupled=True,
    elementwise=True,
    by_weight=True,
    takes_complex=True,
    classes=("torch.optim.adamw.AdamW",),
    motion=ADAM_MOTION,
)

ADAM = OptimizerKind(
    name="adam",
    description="Adam, whose weight decay is added to the gradient unless `optimizer.decoupled_weight_decay`",
    cost="2",
    make=_adam,
    decay_temporaries=1,
    values=2.0,
    reads=BETAS,
    elementwise=True,
    by_weight=True,
    takes_complex=True,
    classes=("torch.optim.adam.Adam",),
    motion=ADAM_MOTION,
)

AUTO = replace(
    ADAMW,
    name="auto",
    description="what a LightningModule's `configure_optimizers` returns",
    cost="a LightningModule's own",
    remarks="else `adamw`",
    classes=(),
    motion=None,
)
