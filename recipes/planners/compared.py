"""Asks every planner for a layout of a workload, and plans each answer."""

from __future__ import annotations

import sys
from typing import Any

from runner.launch.run.find_layout import AUTO, Compared, compare_planners
from runner.plan.planners.told import order_text
from runner.recipes.planners.workloads import Workload

__all__ = ["compared", "row_of"]


def compared(workload: Workload) -> list[dict[str, Any]]:
    """A row for each planner."""
    rows = compare_planners([*workload.words, AUTO], lambda line: print(line, file=sys.stderr, flush=True))
    return [row_of(workload.name, row) for row in rows]


def row_of(workload: str, row: Compared) -> dict[str, Any]:
    """What one planner has found, as plain values."""
    plan = row.plan
    made: dict[str, Any] = {
        "workload": workload,
        "planner": row.planner,
        "search_seconds": row.search_seconds,
        "own_seconds": row.own_prediction,
        "planned_seconds": None,
        "peak_bytes": None,
        "fits": None,
        "layout": None,
        "why_not": row.why_not or None,
        "overrides": list(row.overrides),
    }
    if plan is not None:
        degrees = "·".join(str(plan.layout[axis]) for axis in ("pipeline", "data", "tensor"))
        order = f" {order_text(plan)}" if plan.layout["pipeline"] > 1 else ""
        made |= {
            "planned_seconds": plan.time.step_seconds,
            "peak_bytes": max(plan.peak_memory_bytes),
            "fits": plan.fits,
            "layout": f"{degrees}{order}, T = {plan.schedule.microbatches}",
        }
    return made
