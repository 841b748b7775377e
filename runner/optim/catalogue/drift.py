"""PipeMare's discrepancy correction: backwards use an estimate of the weights that their forward has used.

The estimate goes back from the newest weights along the running mean of their changes, delta: u = w - age * delta. The
mean keeps decay = C^(1 / age) of what it was at each step.

Source: Yang et al., "PipeMare: Asynchronous Pipeline Parallel DNN Training", 2021; decay and C = e^-2 from memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.optim.catalogue.prediction import Moment, PredictionKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DRIFT", "DRIFT_KEY"]

DRIFT_KEY = "drift"
"""Key, in a weight's optimizer state, of the running mean of its changes."""


def _predict(moment: Moment) -> Tensor:
    changed: Tensor = (moment.state[DRIFT_KEY] * moment.gap).add_(moment.weight)
    return changed


DRIFT = PredictionKind(
    name="drift",
    description="goes back along the running mean of the weights' changes",
    predict=_predict,
    temporaries=1,
    reads=(DRIFT_KEY,),
)
