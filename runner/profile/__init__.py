"""What a plan needs to know about a model: one row of numbers per layer, without modules.

:mod:`runner.profiling` makes a :class:`ModelProfile` from the model on fake tensors (bytes, FLOPs) and, if it can run
the layers, from measured times. Plans and memory policies only read it.
"""

from __future__ import annotations

from runner.profile.files import PROFILE_FILE, profile_from_json
from runner.profile.layer import (
    BoundaryTensor,
    Exchange,
    FillProfile,
    GradientPeaks,
    LayerMoves,
    LayerProfile,
    Pairs,
    Recomputation,
    SharedGradient,
    SplitBackward,
)
from runner.profile.model import (
    NOTICEABLE_SHARE,
    ChangedState,
    ModelProfile,
    OddWeight,
    OwnUpdate,
    Rehearsal,
    SecondsSource,
    SharedWeight,
)

__all__ = [
    "ChangedState",
    "BoundaryTensor",
    "Exchange",
    "FillProfile",
    "GradientPeaks",
    "LayerMoves",
    "LayerProfile",
    "ModelProfile",
    "NOTICEABLE_SHARE",
    "OddWeight",
    "OwnUpdate",
    "PROFILE_FILE",
    "Pairs",
    "Recomputation",
    "Rehearsal",
    "SecondsSource",
    "SharedGradient",
    "SharedWeight",
    "SplitBackward",
    "profile_from_json",
]
