"""The entry of a planner in the catalogue: what it chooses and by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["AGAIN", "CUTS", "PARTS", "REPLICAS", "Planner", "PlannerKind"]

Planner = Callable[[PlanningProblem], PlanningAnswer | None]
"""Answers a problem; None if nothing fits by its own model."""

CUTS, REPLICAS, PARTS, AGAIN = "PP", "DP", "TP", "checkpointing"
"""What a planner may decide: the cut or the depth, replicas, parts of layers, what runs forward again."""


@dataclass(frozen=True, slots=True)
class PlannerKind:
    """A planner that is not ours: a published one, or a user's own.

    Args:
        name: the name, as in ``planner=NAME``.
        plan: the planner.
        axes: what it decides, of :data:`CUTS`, :data:`REPLICAS`, :data:`PARTS` and :data:`AGAIN`.
        chooses: the same in words.
        by: how.
        lacks: what its model leaves out.
        position: its place in lists, ascending.
        forms: other forms of its model, by the value of ``planner.form`` that asks for them.
    """

    name: str
    plan: Planner
    axes: tuple[str, ...] = ()
    chooses: str = ""
    by: str = ""
    lacks: str = ""
    position: int = 1000
    forms: Mapping[str, Planner] = field(default_factory=dict)
