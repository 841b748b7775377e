"""Prediction by momentum: w - gap * rate * v, with SGD's momentum v.

Source: Chen et al., "Efficient and Robust Parallel DNN Training through Model Parallelism on Multi-GPU Platform"
(SpecTrain), 2018.
"""

from __future__ import annotations

from runner.optim.catalogue.motion import Motion
from runner.optim.catalogue.prediction import PredictionKind, linear

__all__ = ["MOMENTUM"]


def _reason_against(motion: Motion) -> str | None:
    return None if motion.family == "momentum" else "it steps along no momentum alone"


MOMENTUM = PredictionKind(
    name="momentum",
    description="steps along SGD's momentum: w - gap x rate x v",
    predict=linear,
    temporaries=1,
    reason_against=_reason_against,
)
