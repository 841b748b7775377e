"""Chooses which ranks lend what they save of some micro-batches to ranks with room, so that all keep to their limit.

A rank above its limit keeps one micro-batch less at a time, until it fits, and another rank keeps those meanwhile: of
the ranks for which that is not too much, the one with most room. What both need is predicted by the walk of the lowered
schedule, with the moves in it. The fullest rank lends first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from runner.memory.solve.values import ActivationPlan, Segment
from runner.plan.draft.draft import Draft
from runner.plan.draft.memory import memory_of
from runner.plan.memory.held import held_microbatches
from runner.plan.stages.figures import StageFigures
from runner.schedule.lending import FEWEST, Loan, with_loans
from runner.schedule.lowering.program import lower
from runner.schedule.values import Schedule

__all__ = ["possible_loans", "with_lenders_whole", "with_room_lent"]

_APART = 2  # ranks between which other messages go the same way are nearer


def with_room_lent(draft: Draft, figures: Sequence[StageFigures]) -> Schedule:
    """The draft's schedule with loans, if ranks need more than their limit and others have room.

    Args:
        draft: its schedule has whole backwards and one stage on each rank.
        figures: the figures of each stage.
    """
    plain = draft.schedule
    if plain.moves:  # those of an earlier plan of the same request
        return plain
    loans: list[Loan] = []
    peaks = _peaks(draft, figures, loans)
    full = [rank for rank, peak in enumerate(peaks) if peak > draft.limit_bytes]
    for lender in sorted(full, key=lambda rank: -peaks[rank]):
        for loan in possible_loans(plain, lender, hosts=set(range(plain.ranks)) - set(full), peaks=peaks):
            found = _peaks(draft, figures, [*loans, loan])
            if found[lender] <= draft.limit_bytes and found[loan.host] <= draft.limit_bytes:
                loans.append(loan)
                peaks = found
                break
    return with_loans(plain, loans) if loans else plain


def with_lenders_whole(plan: ActivationPlan, layers: Sequence[tuple[int, int]], schedule: Schedule) -> ActivationPlan:
    """The plan in which stages of ranks that lend keep everything.

    Args:
        plan: the programs of the stages, each chosen among offers.
        layers: first and last layer of each stage.
        schedule: a schedule with loans.
    """
    hosts = {move.stage: move.peer for move in schedule.moves}
    stages, choices = list(plan.stages), list(plan.choices)
    for stage, host in hosts.items():
        stages[stage] = (Segment(*layers[stage]),)
        fastest = min(choices[stage].offers, key=lambda offer: offer.seconds)
        choices[stage] = replace(choices[stage], chosen=fastest._replace(name=f"lending to rank {host}"))
    return replace(plan, stages=tuple(stages), choices=tuple(choices))


def possible_loans(schedule: Schedule, lender: int, *, hosts: Iterable[int], peaks: Sequence[int]) -> Iterator[Loan]:
    """The loans of a rank: those that move least first, and of these that to the rank with most room."""
    (stage,) = schedule.stages_of(lender)
    keeps = max(held.saved for held in held_microbatches(schedule)[stage])
    apart = [host for host in hosts if abs(host - lender) >= _APART]
    for most in range(keeps - 1, FEWEST - 1, -1):
        yield from (Loan(lender, host, most) for host in sorted(apart, key=lambda host: peaks[host]))


def _peaks(draft: Draft, figures: Sequence[StageFigures], loans: Sequence[Loan]) -> tuple[int, ...]:
    lent = replace(draft, schedule=with_loans(draft.schedule, loans)) if loans else draft
    return memory_of(lent, lower(lent.schedule), figures).peak_bytes
