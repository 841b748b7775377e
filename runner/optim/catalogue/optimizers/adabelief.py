"""AdaBelief from pytorch_optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import BETAS, OptimizerKind, common_settings
from runner.optim.catalogue.motion import Motion, Settings, State

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["ADABELIEF"]

_MODULE = "runner.optim.kinds.adabelief"


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.adabelief import AdaBelief

    return AdaBelief(parameters, **common_settings(section))


def _direction(state: State, settings: Settings) -> Tensor:
    first, second = settings["betas"]
    steps = float(state["step"])
    root = (state["exp_avg_var"] / (1 - second**steps)).sqrt_().add_(settings["eps"])
    direction: Tensor = (state["exp_avg"] / (1 - first**steps)).div_(root)
    return direction


ADABELIEF = OptimizerKind(
    name="adabelief",
    description="Adam whose second moment is that of the gradient's distance from its mean",
    cost="2",
    remarks="pytorch_optimizer; not tried on flat partitions, so not with `zero.stage` 1 to 3",
    make=_make,
    values=2.0,
    reads=BETAS,
    decoupled=True,
    package="pytorch_optimizer",
    imports=(_MODULE,),
    classes=(f"{_MODULE}.AdaBelief",),
    motion=Motion(family="adabelief", keys=("exp_avg", "exp_avg_var", "step"), direction=_direction),
)
