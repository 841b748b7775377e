"""Prediction by coasting: the weights after as many steps of the optimizer whose gradients are all zero.

Source: MSNAG of Eliad et al., "Fine-tuning giant neural networks on commodity hardware with automatic pipeline model
parallelism" (FTPipe), 2021, and its published code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.optim.catalogue.motion import Motion
from runner.optim.catalogue.prediction import Moment, PredictionKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NESTEROV"]


def _predict(moment: Moment) -> Tensor:
    assert moment.motion is not None  # a rule requires it, and the next
    assert moment.motion.coasted is not None
    return moment.motion.coasted(moment.weight, moment.state, moment.settings, moment.rates)


def _reason_against(motion: Motion) -> str | None:
    return None if motion.coasted is not None else "its steps without gradients have no known form"


NESTEROV = PredictionKind(
    name="nesterov",
    description="steps of the optimizer itself with zero gradients: its momentum coasts",
    predict=_predict,
    reason_against=_reason_against,
    whole_steps=True,
    temporaries=4,
)
