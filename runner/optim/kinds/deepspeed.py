"""DeepSpeed's Adam in compiled operators, with repairs for Lightning and for checkpoints by parameter."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed decides at its import which operators it builds

from deepspeed.ops.adam import DeepSpeedCPUAdam as CPUAdam
from deepspeed.ops.adam import FusedAdam as _FusedAdam

__all__ = ["CPUAdam", "FusedAdam"]

_destroy = CPUAdam.__del__


def _destroy_once(optimizer: Any) -> None:
    """Destroy the operator only with its optimizer: Lightning's wrappers inherit ``__del__`` and would do it too."""
    if type(optimizer) is CPUAdam:
        _destroy(optimizer)


CPUAdam.__del__ = _destroy_once


class FusedAdam(_FusedAdam):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's FusedAdam with the step count in the state of every parameter.

    DeepSpeed counts the steps of a group only in the state of its last parameter. A checkpoint holds states by
    parameter, and in another layout the last parameter is another one. Stages may be updated one by one, so those that
    are updated together have the same count.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        updated = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        result = super().step(*args, **kwargs)
        for members in updated:
            states = [self.state[p] for p in members]
            steps = max((state["step"] for state in states), default=0)
            for state in states:
                state["step"] = steps
        return result
