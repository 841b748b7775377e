"""``partition=auto`` in a plan: the stages are cut in several ways, and the one with the shortest step is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from runner.errors import RequestError
from runner.plan.cut.partition import Partition
from runner.plan.draft import Draft
from runner.plan.stages.cut import Stages, cut
from runner.plan.values import RunPlan

__all__ = ["best_cut"]

# The second group is tried only if nothing of the first one fits.
_POLICIES = (("uniform", "profile"), ("memory",))

# A cut must be shorter by this share than an earlier one to be taken: measured seconds vary by as much, and a request
# should not get other stages at every measurement.
_LEAST_GAIN = 0.01


def best_cut(draft: Draft, assemble: Callable[[Stages], RunPlan]) -> RunPlan:
    """The plan with the shortest step that fits, among even stages and stages balanced by seconds.

    The seconds are the profile's: measured, or estimated from FLOPs. If neither fits, stages with even peaks of memory
    are tried too; if nothing fits, the plan with the lowest peak is returned.

    Args:
        draft: a request with ``partition=auto``, and what follows from it.
        assemble: makes the plan of some stages.

    Raises:
        RequestError: no way to cut can be trained; the reasons are those of the first one.
    """
    plans: dict[Partition, RunPlan] = {}
    refusals: list[RequestError] = []
    for policies in _POLICIES if draft.schedule.stages > 1 else (("uniform",),):
        for policy in policies:
            try:
                stages = cut(draft, policy)
                if stages.layers not in plans:
                    plans[stages.layers] = assemble(stages)
            except RequestError as refusal:
                refusals.append(refusal)
        fitting = [plan for plan in plans.values() if plan.fits]
        if fitting:
            return _shortest(fitting)
    if not plans:
        raise refusals[0]
    return min(plans.values(), key=lambda plan: max(plan.memory.peak_bytes))


def _shortest(plans: Iterable[RunPlan]) -> RunPlan:
    best, *others = plans
    for plan in others:
        if plan.time.step_seconds < best.time.step_seconds * (1 - _LEAST_GAIN):
            best = plan
    return best
