"""What is held of a stage's weights besides the newest ones: older versions, and predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryParts
from runner.schedule.values import Schedule

__all__ = ["ExtraCopies", "older_versions", "with_extra"]


class ExtraCopies(NamedTuple):
    """What is held of a stage's trained weights besides the newest ones, in copies of them.

    Args:
        weights: older or predicted weights.
        states: values that predictions need of each weight, beside the optimizer's states.
        temporaries: tensors of the size of the largest parameter that a prediction makes and drops, before a forward or
            backward.
        trained: how many copies have gradients and optimizer states; 1: only the newest weights.
    """

    weights: int
    states: int = 0
    temporaries: int = 0
    trained: int = 1

    def held_bytes(self, figures: StageFigures) -> int:
        """The bytes that are held all the time; a gradient is as large as its weight."""
        more = (self.trained - 1) * (figures.gradient_bytes + figures.optimizer_bytes)
        return (self.weights + self.states) * figures.gradient_bytes + more


def older_versions(schedule: Schedule, replicas: int = 1) -> tuple[ExtraCopies, ...]:
    """For each stage, the copies of its weights that are held because actions will still read them.

    Args:
        schedule: the schedule of one replica.
        replicas: the number of replicas. If these exchange changes of weights, each keeps the server's copy, that of
            the wave's beginning, and two copies for each wave that is under way.
    """
    trained = schedule.trained_copies
    exchanged = 2 + 2 * (schedule.distance + 1) if schedule.wave and replicas > 1 else 0
    return tuple(
        ExtraCopies(schedule.older_versions(stage) + exchanged, trained=trained) for stage in range(schedule.stages)
    )


def with_extra(parts: MemoryParts, stages: Iterable[tuple[ExtraCopies, StageFigures]]) -> MemoryParts:
    """Add what is held of the trained weights of a rank's stages."""
    for extra, figures in stages:
        parts = replace(
            parts,
            weights=parts.weights + extra.weights * figures.gradient_bytes,
            gradients=parts.gradients + (extra.trained - 1) * figures.gradient_bytes,
            optimizer=parts.optimizer
            + extra.states * figures.gradient_bytes
            + (extra.trained - 1) * figures.optimizer_bytes,
        )
    return parts
