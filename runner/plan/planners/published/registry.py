"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.plan.planners.published import alpa, dapple, megatron, pipedream, two_bw, varuna
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PUBLISHED", "Planner"]

Planner = Callable[[PlanningProblem], PlanningAnswer | None]
"""Answers a problem; None if nothing fits by its own model."""

PUBLISHED: Mapping[str, Planner] = {
    "pipedream": pipedream.plan,
    "dapple": dapple.plan,
    "2bw": two_bw.plan,
    "alpa": alpa.plan,
    "varuna": varuna.plan,
    "megatron": megatron.plan,
}
"""Every published planner, none of which asks another."""
