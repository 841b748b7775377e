"""Lets ranks keep everything and lend micro-batches to ranks with room, where that is faster than what they do alone.

One rank after the other becomes a lender: of all ranks that run forwards again or move to the host, and of all that
could keep micro-batches for them, those whose step is shortest, until none makes the step shorter. For each, all stages
are planned anew, because a host has less left for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.config.units import format_seconds
from runner.errors import RequestError
from runner.plan.choices import ProgramChoice
from runner.plan.draft.draft import Draft
from runner.plan.draft.loans import possible_loans
from runner.plan.draft.stages import stages_of
from runner.plan.rules.facts import OrderFacts
from runner.plan.rules.schedule import LENDING
from runner.plan.search.boundaries import Assemble
from runner.plan.values import RunPlan
from runner.schedule.lending import Loan, with_loans
from runner.schedule.traits import traits_of

__all__ = ["with_peers"]


def with_peers(draft: Draft, plan: RunPlan, assemble: Assemble, choose: ProgramChoice) -> RunPlan:
    """The plan, with loans if these make its step shorter, or make it fit.

    Args:
        draft: the request, and what follows from it.
        plan: its plan without loans.
        assemble: makes the plan of some stages.
        choose: chooses the programs of the stages; what it has priced serves for all plans.
    """
    if draft.schedule.moves or not _may_lend(draft):
        return plan
    best, loans = plan, list[Loan]()
    while found := _best_of(best, list(_tried(draft, best, loans, assemble, choose))):
        best, loans = found[0], [*loans, found[1]]
    if not loans:
        return plan
    name = f"offload.activations={draft.config.offload.activations}"
    told = ", ".join(f"rank {loan.lender} to rank {loan.host}" for loan in loans)
    after, before = format_seconds(best.time.step_seconds), format_seconds(plan.time.step_seconds)
    line = f"{name} lends micro-batches of {told}: {after} a step, after {before}"
    return replace(best, reasons=(*best.reasons, line + ("" if plan.fits else ", which did not fit")))


def _best_of(plan: RunPlan, tried: Sequence[tuple[RunPlan, Loan]]) -> tuple[RunPlan, Loan] | None:
    better = [each for each in tried if _rank(each[0]) < _rank(plan)]
    return min(better, key=lambda each: _rank(each[0]), default=None)


def _rank(plan: RunPlan) -> tuple[bool, float]:
    """Plans that fit before those that do not, and these by the most that a rank needs."""
    return not plan.fits, plan.time.step_seconds if plan.fits else max(plan.peak_memory_bytes)


def _tried(
    draft: Draft, plan: RunPlan, loans: Sequence[Loan], assemble: Assemble, choose: ProgramChoice
) -> Iterator[tuple[RunPlan, Loan]]:
    """For each further lender and each host the plan of the smallest loan that fits."""
    plain, peaks = draft.schedule, plan.peak_memory_bytes
    lenders, busy = {loan.lender for loan in loans}, {loan.host for loan in loans}
    for lender in sorted(_slowed(plan) - lenders - busy):
        hosts = set(range(plain.ranks)) - lenders - {lender}
        done = set[int]()
        for loan in possible_loans(plain, lender, hosts=hosts, peaks=peaks):
            if loan.host in done:
                continue
            lent = replace(draft, schedule=with_loans(plain, [*loans, loan]))
            try:
                stages = stages_of(lent, plan.partition, choose=choose)
            except RequestError:
                continue
            found = assemble(replace(stages, schedule=lent.schedule))
            if found.fits:
                done.add(loan.host)
                yield found, loan


def _slowed(plan: RunPlan) -> set[int]:
    """The ranks whose stage has another program than the fastest."""
    choices = enumerate(plan.activations.choices)
    stages = {number for number, each in choices if each.chosen.seconds > min(one.seconds for one in each.offers)}
    return {rank for rank in range(plan.schedule.ranks) if stages & set(plan.schedule.stages_of(rank))}


def _may_lend(draft: Draft) -> bool:
    facts = OrderFacts(draft.config, traits_of(draft.schedule), len(draft.profile.layers), ())
    return not any(True for rule in LENDING.rules for _ in rule.problems(facts))
