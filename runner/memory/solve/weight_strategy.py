"""Defines a strategy that says which layers' weights are at home in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runner.memory.solve.residency import WeightUnit

__all__ = ["StageUnits", "WeightOptions", "WeightPlan", "WeightStrategy"]


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """The options of a request that strategies read.

    Args:
        blocks: how many of each stage's blocks move.
        fraction: the share of each stage's layers that moves.
        frozen_only: whether only frozen weights move; they are read, and nothing goes back to the host.
    """

    blocks: int | None = None
    fraction: float | None = None
    frozen_only: bool = False


@dataclass(frozen=True, slots=True)
class StageUnits:
    """One stage as a strategy sees it.

    Args:
        units: the parts of the stage whose weights can move, in order: layers, or segments that are computed again.
        excess_bytes: what its device must be rid of; None if it is not known yet, or nothing is too much.
        options: the options of the request.
        forward, backward: seconds of each unit's layers.
        copying: seconds of the copy of each unit's weights, in one direction.
    """

    units: Sequence[WeightUnit]
    excess_bytes: int | None
    options: WeightOptions = WeightOptions()
    forward: Sequence[float] = ()
    backward: Sequence[float] = ()
    copying: Sequence[float] = ()


Choose = Callable[[StageUnits], Sequence[WeightUnit]]
"""A pure function from a stage to the units that move."""


@dataclass(frozen=True, slots=True)
class WeightStrategy:
    """One way to choose which weights are in the host's memory.

    Args:
        name: how ``offload.weights`` names it.
        choose: see :data:`Choose`.
        source: the publication or software from which it comes.
        about: what it does, in one line.
        reads_budget: whether it moves as little as ``memory_limit`` asks for, where the request gives no share.
        layer_by_layer: whether it needs an order in which all micro-batches go through a stage in one stretch, and
            stages that keep their inputs alone.
    """

    name: str
    choose: Choose
    source: str
    about: str
    reads_budget: bool = False
    layer_by_layer: bool = False


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Which weights are in the host's memory.

    Args:
        stages: for each stage the units that move.
        frozen_only: see :class:`WeightOptions`.
    """

    stages: tuple[tuple[WeightUnit, ...], ...] = ()
    frozen_only: bool = False

    def of(self, stages: Sequence[int]) -> tuple[WeightUnit, ...]:
        """The units of a rank's stages, in their order."""
        return tuple(unit for stage in stages for unit in (self.stages[stage] if self.stages else ()))

    def to_json(self) -> list[list[dict[str, Any]]]:
        """The units of each stage, for the plan's document."""
        return [
            [{"layers": [unit.first, unit.last], "bytes": unit.weight_bytes} for unit in units] for units in self.stages
        ]
