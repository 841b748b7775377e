"""No prediction."""

from __future__ import annotations

from runner.optim.catalogue.prediction import PredictionKind

__all__ = ["NONE"]

NONE = PredictionKind(name="none", description="weights are read as they are", predict=None)
