"""Replaces the peaks that a plan derives by those that a run on tensors without memory counts."""

from __future__ import annotations

from dataclasses import replace

from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import Problem
from runner.plan.values import RunPlan
from runner.progress import now

__all__ = ["unless_counted_to_fit", "with_rehearsal"]

_WITHIN = 2  # times the limit that a derived peak may be where the counted one may still fit
_MOST_FORWARDS = 512  # of layers in a step: some seconds


def with_rehearsal(config: RunConfig, plan: RunPlan) -> RunPlan:
    """The plan with counted peaks, by which it fits or not; a run that cannot be played keeps its own, and says why.

    Args:
        config: the request.
        plan: its plan.
    """
    from runner.training.rehearsal import rehearse_run

    now("rehearsing on tensors without memory")
    found = rehearse_run(config, plan)
    if not found.peak_bytes:
        return replace(plan, advice=(f"peaks are derived, not rehearsed: {found.reason}", *plan.advice))
    counted = replace(plan, memory=plan.memory.counted(found.peak_bytes))
    if counted.fits:
        return replace(counted, problems=())
    return counted if counted.problems else replace(counted, problems=(_too_much(counted),))


def unless_counted_to_fit(config: RunConfig, plan: RunPlan) -> RunPlan:
    """The plan; if it does not fit by peaks that may be bounds, and fits by those of a rehearsal, with these.

    Args:
        config: the request.
        plan: its plan.
    """
    forwards = len(plan.profile.layers) * plan.schedule.microbatches
    far = any(peak > _WITHIN * plan.limit_of(rank) for rank, peak in enumerate(plan.peak_memory_bytes))
    if plan.fits or far or forwards > _MOST_FORWARDS or plan.memory.is_rehearsed:
        return plan
    counted = with_rehearsal(config, plan)
    return counted if counted.fits else plan


def _too_much(plan: RunPlan) -> Problem:
    rank = plan.fullest
    limit, needs = format_bytes(plan.limit_of(rank)), format_bytes(plan.peak_memory_bytes[rank])
    return Problem("memory_limit", limit, f"is exceeded: rank {rank} needs {needs}", "This was counted in a rehearsal")
