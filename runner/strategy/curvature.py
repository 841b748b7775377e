"""K-FAC in the engine: finds the layers of a rank that it preconditions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain

from torch import nn
from torch.optim import Optimizer

from runner.engine.actions.curvature import ScheduledCurvature
from runner.model.layers import StageModule
from runner.optim.kinds.kfac import KFAC, preconditioned_layers

__all__ = ["layers_of_stages", "preconditioning", "schedule_curvature", "watch_curvature"]


def preconditioning(optimizer: Optimizer) -> KFAC | None:
    """The optimizer if it is K-FAC, else None."""
    optimizer = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
    return optimizer if isinstance(optimizer, KFAC) else None


def watch_curvature(optimizer: Optimizer, stages: Mapping[int, StageModule], tied: Collection[str]) -> KFAC | None:
    """Let K-FAC watch the layers of a rank's stages; None for another optimizer.

    Args:
        tied: first names of the weights with several names, which are never preconditioned, whatever the cut.
    """
    kfac = preconditioning(optimizer)
    if kfac is not None:
        kfac.watch(chain.from_iterable(layers_of_stages(stages, tied).values()))
    return kfac


def schedule_curvature(
    optimizer: Optimizer, stages: Mapping[int, StageModule], tied: Collection[str]
) -> ScheduledCurvature | None:
    """Like :func:`watch_curvature`, for a schedule that says when K-FAC sums and inverts."""
    kfac = preconditioning(optimizer)
    return None if kfac is None else ScheduledCurvature(kfac, layers_of_stages(stages, tied))


def layers_of_stages(stages: Mapping[int, StageModule], tied: Collection[str]) -> dict[int, list[nn.Linear]]:
    """The layers of each stage that are preconditioned; ``tied`` as in :func:`watch_curvature`."""
    found = {}
    for number, stage in stages.items():
        named = stage.named_parameters(remove_duplicate=False)
        weights = [parameter for name, parameter in named if stage.global_name(name) in tied]
        found[number] = list(preconditioned_layers(stage, weights))
    return found
