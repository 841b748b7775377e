"""Torch's gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import OptimizerKind
from runner.optim.catalogue.motion import Motion, Settings, State

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["SGD"]


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import SGD as TorchSGD

    return TorchSGD(parameters, lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay)


def _coasted(weight: Tensor, state: State, settings: Settings, rates: Sequence[float]) -> Tensor:
    """The weight after steps whose momentum shrinks by its factor each time."""
    travel = sum(rate * settings["momentum"] ** number for number, rate in enumerate(rates, 1))
    coasted: Tensor = weight - travel * state["momentum_buffer"]
    return coasted


_MOTION = Motion(
    family="momentum",
    keys=("momentum_buffer",),
    direction=lambda state, settings: state["momentum_buffer"],
    coasted=_coasted,
)

SGD = OptimizerKind(
    name="sgd",
    description="gradient descent, with `optimizer.momentum` where asked for",
    cost="0, with momentum 1",
    make=_make,
    lingering=0,
    values=0.0,
    temporaries=0,
    decay_temporaries=1,
    reads=("momentum",),
    decoupled=False,
    elementwise=True,
    by_weight=True,
    takes_complex=True,
    classes=("torch.optim.sgd.SGD",),
    motion=_MOTION,
)
