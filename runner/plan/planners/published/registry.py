"""The planners by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runner.plan.planners.published import (
    alpa,
    autopipe,
    beaumont,
    chimera,
    dapple,
    efftra,
    hetpipe,
    megatron,
    pipe_torch,
    pipedream,
    piper,
    rl,
    two_bw,
    unity,
    varuna,
    vpipe,
)
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PUBLISHED", "Planner"]

Planner = Callable[[PlanningProblem], PlanningAnswer | None]
"""Answers a problem; None if nothing fits by its own model."""

PUBLISHED: Mapping[str, Planner] = {
    "pipedream": pipedream.plan,
    "dapple": dapple.plan,
    "2bw": two_bw.plan,
    "piper": piper.plan,
    "alpa": alpa.plan,
    "unity": unity.plan,
    "rl": rl.plan,
    "autopipe": autopipe.plan,
    "hetpipe": hetpipe.plan,
    "pipe_torch": pipe_torch.plan,
    "varuna": varuna.plan,
    "chimera": chimera.plan,
    "efftra": efftra.plan,
    "megatron": megatron.plan,
    "vpipe": vpipe.plan,
    "beaumont": beaumont.plan,
}
"""Every published planner, none of which asks another."""
