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
    """

    weights: int
    states: int = 0
    temporaries: int = 0

    def held_bytes(self, figures: StageFigures) -> int:
        """The bytes that are held all the time; a gradient is as large as its weight."""
        return (self.weights + self.states) * figures.gradient_bytes


def older_versions(schedule: Schedule) -> tuple[ExtraCopies, ...]:
    """For each stage, the older versions of its weights that are held because actions will still read them."""
    return tuple(ExtraCopies(schedule.older_versions(stage)) for stage in range(schedule.stages))


def with_extra(parts: MemoryParts, stages: Iterable[tuple[ExtraCopies, StageFigures]]) -> MemoryParts:
    """Add what is held of the trained weights of a rank's stages."""
    for extra, figures in stages:
        parts = replace(
            parts,
            weights=parts.weights + extra.weights * figures.gradient_bytes,
            optimizer=parts.optimizer + extra.states * figures.gradient_bytes,
        )
    return parts
