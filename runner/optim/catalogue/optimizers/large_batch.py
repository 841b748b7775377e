"""LARS and LAMB from pytorch_optimizer, whose learning rates depend on the norms of whole tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import BETAS, FP32_WIDTH, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["LAMB", "LARS"]

_MODULE = "runner.optim.kinds.large_batch"
_REMARKS = "pytorch_optimizer; whole tensors, so not with `zero.stage` 1 to 3"


def _lars(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.large_batch import LARS as LibrarysLARS

    return LibrarysLARS(parameters, lr=section.lr, momentum=section.momentum, weight_decay=section.weight_decay)


def _lamb(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.large_batch import Lamb

    return Lamb(parameters, **common_settings(section))


LARS = OptimizerKind(
    name="lars",
    description="gradient descent whose rate follows each matrix's norm over its gradient's, for large batches",
    cost="0, with momentum 1",
    remarks=_REMARKS,
    make=_lars,
    lingering=0,
    values=0.0,
    norms_from=2,
    reads=("momentum",),
    decoupled=False,
    package="pytorch_optimizer",
    imports=(_MODULE,),
)

LAMB = OptimizerKind(
    name="lamb",
    description="Adam whose step of each tensor is as long as its norm times the rate, for large batches",
    cost="2",
    remarks=_REMARKS,
    make=_lamb,
    temporaries=1,
    at_once=lambda replicas: FP32_WIDTH,  # the library keeps the direction of every weight until it has all norms
    values=2.0,
    norms_from=1,
    reads=BETAS,
    decoupled=True,
    package="pytorch_optimizer",
    imports=(_MODULE,),
    classes=(f"{_MODULE}.Lamb",),
)
