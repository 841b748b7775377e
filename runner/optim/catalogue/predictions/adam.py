"""Prediction by Adam's direction: w - gap * rate * m_hat / (sqrt(v_hat) + eps).

Source: Guan et al., "XPipe: Efficient Pipeline Model Parallelism for Multi-GPU DNN Training", 2019.
"""

from __future__ import annotations

from runner.optim.catalogue.motion import Motion
from runner.optim.catalogue.prediction import PredictionKind, linear

__all__ = ["ADAM"]


def _reason_against(motion: Motion) -> str | None:
    return None if motion.family == "adam" else "it does not step along Adam's moments"


ADAM = PredictionKind(
    name="adam",
    description="steps along Adam's direction: w - gap x rate x m_hat / (sqrt(v_hat) + eps)",
    predict=linear,
    reason_against=_reason_against,
)
