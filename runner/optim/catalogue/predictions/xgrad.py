"""XGrad: prediction by the optimizer's own last direction; also without a pipeline, one step ahead by default.

Source: Guan et al., "XGrad: Boosting Gradient-Based Optimizers With Weight Prediction", 2023.
"""

from __future__ import annotations

from runner.optim.catalogue.prediction import PredictionKind, linear

__all__ = ["XGRAD"]

XGRAD = PredictionKind(
    name="xgrad",
    description="steps along the optimizer's own last direction; in a flushed schedule one step ahead by default",
    predict=linear,
    flushed_gap=1,
)
