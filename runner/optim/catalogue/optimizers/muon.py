"""Torch's Muon, with AdamW for the weights that are no matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.catalogue.kind import BETAS, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["MUON"]

_MODULE = "runner.optim.kinds.muon"


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.muon import Muon

    return Muon(parameters, momentum=section.momentum, **common_settings(section))


MUON = OptimizerKind(
    name="muon",
    description="momentum of each matrix, made orthogonal; AdamW for all other weights",
    cost="1 for matrices, else 2",
    remarks="whole matrices, so not with `zero.stage` 1 to 3",
    make=_make,
    values_by_axes=lambda axes: 1.0 if axes == 2 else 2.0,
    lingering=0,
    temporaries=1,  # the momentum that is looked ahead
    half_temporaries=4,  # torch/optim/_muon.py: what it makes orthogonal, two products, and one that is made anew
    whole_matrices=True,
    reads=("momentum", *BETAS),
    decoupled=True,
    classes=(f"{_MODULE}.Muon",),
)
