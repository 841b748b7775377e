"""Torch's RMSprop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import FP32_WIDTH, OptimizerKind
from runner.optim.catalogue.motion import LAST_GRADIENT, Motion, Settings, State

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["RMSPROP"]


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from torch.optim import RMSprop as TorchRMSprop

    return TorchRMSprop(parameters, lr=section.lr, eps=section.eps, weight_decay=section.weight_decay)


def _direction(state: State, settings: Settings) -> Tensor:
    direction: Tensor = state[LAST_GRADIENT] / (state["square_avg"].sqrt() + settings["eps"])
    return direction


RMSPROP = OptimizerKind(
    name="rmsprop",
    description="each element's gradient divided by the root of the mean of its squares (0.99 of it from before)",
    cost="1",
    make=_make,
    temporaries=1,
    decay_temporaries=1,
    values=1.0,
    count_bytes=FP32_WIDTH,
    reads=("eps",),
    decoupled=False,
    elementwise=True,
    takes_complex=True,
    classes=("torch.optim.rmsprop.RMSprop",),
    motion=Motion(family="rmsprop", keys=("square_avg", LAST_GRADIENT), direction=_direction, needs_gradient=True),
)
