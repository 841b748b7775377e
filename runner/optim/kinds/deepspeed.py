"""DeepSpeed's Adam in compiled operators, with what Lightning and checkpoints by parameter need mended."""

from __future__ import annotations

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # which operators it builds is decided when it is imported

from deepspeed.ops.adam import DeepSpeedCPUAdam as CPUAdam
from deepspeed.ops.adam import FusedAdam as _FusedAdam

__all__ = ["CPUAdam", "FusedAdam"]

_destroy = CPUAdam.__del__


def _destroy_once(optimizer: Any) -> None:
    """Lightning's wrappers inherit from the class that they wrap: when one of them went, it took the operator along."""
    if type(optimizer) is CPUAdam:
        _destroy(optimizer)


CPUAdam.__del__ = _destroy_once


class FusedAdam(_FusedAdam):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's, which counts the steps of a group in the state of its last parameter alone.

    A checkpoint goes by parameter: another layout has another last one.
    """

    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().step(*args, **kwargs)
        for group in self.param_groups:
            states = [self.state[p] for p in group["params"] if p in self.state]
            steps = max((state["step"] for state in states), default=0)
            for state in states:
                state["step"] = steps
        return result
