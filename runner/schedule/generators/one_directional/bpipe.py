"""BPipe: 1F1B in which the first ranks, which keep most, lend micro-batches to the last ranks, which keep least.

Source: Kim et al., BPipe, 2023. Rank x of the first half is paired with rank D-1-x. The order of compute is 1F1B's.
"""

from __future__ import annotations

from dataclasses import replace

from runner.schedule.generators.forms import flushed
from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b
from runner.schedule.kinds import Legal, ScheduleSpec
from runner.schedule.lending import Loan, with_loans
from runner.schedule.values import Schedule

__all__ = ["SPEC", "bpipe", "most_kept"]


def most_kept(ranks: int) -> int:
    """The most micro-batches that a rank keeps: half of the D + 1 that 1F1B keeps on both ranks of a pair."""
    return ranks // 2 + 1


def bpipe(ranks: int, microbatches: int) -> Schedule:
    """Generate BPipe.

    Args:
        ranks: D, even.
        microbatches: any number.
    """
    order = one_f_one_b(ranks, microbatches)
    loans = [Loan(rank, ranks - 1 - rank, most_kept(ranks)) for rank in range(ranks // 2)]
    return replace(with_loans(order, loans), name="bpipe")


SPEC = ScheduleSpec(
    name="bpipe",
    position=160,
    description="1f1b whose first ranks lend micro-batches to the last ones: half of the peak, for messages",
    summary="`1f1b` whose first ranks lend activations to the last",
    source="Kim et al., BPipe, 2023",
    formulas=flushed("min(D // 2 + 1, D - r) if r < D // 2 else D // 2", when="T >= D"),
    generate=lambda request: bpipe(request.ranks, request.microbatches),
    ranks=Legal("even", lambda _, ranks: ranks % 2 == 0),
)
