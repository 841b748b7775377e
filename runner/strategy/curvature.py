"""K-FAC in the engine: which layers of a rank it preconditions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from runner.model.layers import StageModule
from runner.model.ties import Tie
from runner.optim.kfac import KFAC, preconditioned_layers

__all__ = ["preconditioning", "watch_curvature"]


def preconditioning(optimizer: Optimizer) -> KFAC | None:
    """The optimizer, where it is K-FAC."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    return optimizer if isinstance(optimizer, KFAC) else None


def watch_curvature(optimizer: Optimizer, stages: Iterable[StageModule], ties: Sequence[Tie]) -> KFAC | None:
    """Let K-FAC watch the layers of a rank's stages; None where the optimizer is another.

    Args:
        ties: of the whole model: a weight with several names is preconditioned nowhere, whatever the cut.
    """
    kfac = preconditioning(optimizer)
    if kfac is None:
        return None
    tied_names = {tie.name for tie in ties}
    for stage in stages:
        named = stage.named_parameters(remove_duplicate=False)
        kfac.watch(preconditioned_layers(stage, [p for name, p in named if stage.global_name(name) in tied_names]))
    return kfac
