"""The cut of a plan: the request's policy, unless even stages are faster; ``auto`` tries several policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from runner.config.units import format_bytes, format_seconds
from runner.errors import RequestError
from runner.plan.activations import has_peers, moves_boundaries
from runner.plan.choices import ProgramChoice
from runner.plan.cut.chosen import AUTO, FIXED
from runner.plan.cut.partition import Partition
from runner.plan.draft.draft import Draft
from runner.plan.draft.stages import Stages, choice_of, cut
from runner.plan.search.boundaries import Assemble, with_boundaries_moved
from runner.plan.search.peers import with_peers
from runner.plan.values import RunPlan

__all__ = ["best_cut"]

_EVEN, _BY_SECONDS, _BY_MEMORY = "uniform", "profile", "memory"
_FIRST = (_EVEN, _BY_SECONDS)  # what auto tries; by memory is tried only if nothing of these fits

# A cut must be shorter by this share than an earlier one for auto to take it: measured seconds vary by as much, and a
# request should not get other stages at every measurement.
_LEAST_GAIN = 0.01


def best_cut(draft: Draft, assemble: Assemble) -> RunPlan:
    """The plan with the stages of the request's policy.

    ``auto`` takes the shortest step that fits, among even stages and stages balanced by seconds. The seconds are the
    profile's: measured, or estimated from FLOPs. If neither fits, stages with even peaks of memory are tried too; if
    nothing fits, the even stages are returned. Some offload strategies then move boundaries. Another
    policy gives way to even stages where these fit and have a shorter step.

    Args:
        draft: a request, and what follows from it.
        assemble: makes the plan of some stages.

    Raises:
        RequestError: no way to cut can be trained; the reasons are those of the first one.
    """
    policy = draft.config.partition.name
    if policy in FIXED or draft.schedule.stages == 1:
        choose = choice_of(draft)
        plan = assemble(cut(draft, _EVEN if policy == AUTO else policy, choose=choose))
        return with_peers(draft, plan, assemble, choose) if has_peers(draft.config) else plan
    if policy != AUTO:
        return _unless_even_is_faster(draft, assemble)
    choose = choice_of(draft)
    plan = _shortest_cut(draft, assemble, choose)
    if has_peers(draft.config):
        return with_peers(draft, plan, assemble, choose)
    return with_boundaries_moved(draft, plan, assemble, choose) if moves_boundaries(draft.config) else plan


def _shortest_cut(draft: Draft, assemble: Assemble, choose: ProgramChoice) -> RunPlan:
    plans: dict[Partition, tuple[str, RunPlan]] = {}
    refusals: list[RequestError] = []
    for policies in (_FIRST, (_BY_MEMORY,)):
        for policy in policies:
            try:
                stages = cut(draft, policy, choose=choose)
                if stages.layers not in plans:
                    plans[stages.layers] = policy, assemble(stages)
            except RequestError as refusal:
                refusals.append(refusal)
        fitting = [(policy, plan) for policy, plan in plans.values() if plan.fits]
        if fitting:
            return _told(_shortest(fitting), fitting)
    if not plans:
        raise refusals[0]
    return _shown(list(plans.values()))


def _shown(plans: Sequence[tuple[str, RunPlan]]) -> RunPlan:
    """The first plan of those that do not fit, the even one as a rule, with the lowest peak of them.

    A cut by memory says little to who has to change something else: it puts most layers on the rank with the fewest
    micro-batches in flight.
    """
    (_, shown), *_ = plans
    name, lowest = min(plans, key=lambda each: _highest_peak(each[1]))
    told = f"no cut fits; the lowest peak of those tried is {format_bytes(_highest_peak(lowest))}, by partition={name}"
    return replace(shown, reasons=(*shown.reasons, told))


def _shortest(plans: Iterable[tuple[str, RunPlan]]) -> tuple[str, RunPlan]:
    best, *others = plans
    for one in others:
        if one[1].time.step_seconds < best[1].time.step_seconds * (1 - _LEAST_GAIN):
            best = one
    return best


def _told(best: tuple[str, RunPlan], others: Iterable[tuple[str, RunPlan]]) -> RunPlan:
    """The best plan with the reason why it is the best."""
    policy, plan = best
    seconds = {name: format_seconds(each.time.step_seconds) for name, each in others}
    rest = ", ".join(f"{name} {told}" for name, told in seconds.items() if name != policy)
    beside = f", beside {rest}" if rest else "; the other cuts tried are the same or do not fit"
    return replace(plan, reasons=(*plan.reasons, f"partition=auto takes {policy}: {seconds[policy]} a step{beside}"))


def _unless_even_is_faster(draft: Draft, assemble: Assemble) -> RunPlan:
    policy = draft.config.partition.name
    try:
        even = assemble(cut(draft, _EVEN))
    except RequestError:
        return assemble(cut(draft, policy))
    if not even.fits:
        return assemble(cut(draft, policy))
    tried = [assemble(stages) for stages in _cuts(draft, policy, even)]
    good = [plan for plan in tried if plan.fits and plan.time.step_seconds <= even.time.step_seconds]
    if policy == _BY_MEMORY:
        return min([*good, even], key=_highest_peak)
    if good:
        return good[0]
    told = f"a step of {format_seconds(tried[0].time.step_seconds)}" if tried[0].fits else "no cut that fits"
    shorter = format_seconds(even.time.step_seconds)
    line = f"partition={policy} has {told}, and even stages have one of {shorter}: these are taken"
    return replace(even, advice=(line, *even.advice))


def _cuts(draft: Draft, policy: str, even: RunPlan) -> list[Stages]:
    """The cuts by a policy; by memory, those that are as fast as even stages and as stages balanced by seconds."""
    if policy != _BY_MEMORY:
        return [cut(draft, policy)]
    balanced = cut(draft, _BY_SECONDS)
    return [cut(draft, policy, as_fast_as=layers) for layers in (even.partition, balanced.layers)] + [balanced]


def _highest_peak(plan: RunPlan) -> int:
    return max(plan.memory.peak_bytes)
