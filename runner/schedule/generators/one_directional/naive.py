"""Naive model parallelism: one micro-batch at a time through all ranks and back."""

from __future__ import annotations

from collections.abc import Sequence

from runner.schedule.generators.forms import SHARES
from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.kinds import Formulas, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = ["SPEC", "naive"]


def naive(ranks: int, microbatches: int, name: str = "naive", shares: Sequence[float] | None = None) -> Schedule:
    """Generate F and B of each micro-batch in turn. On one rank this is plain gradient accumulation."""
    rows = [[op(rank, m) for m in range(microbatches) for op in (forward, backward)] for rank in range(ranks)]
    return of_one_pipeline(name, looping(ranks, 1), rows, microbatches, shares)


SPEC = ScheduleSpec(
    name="naive",
    position=10,
    description="one micro-batch at a time through all ranks and back",
    summary="one micro-batch at a time: one rank of p works",
    source="the baseline of every pipeline paper",
    formulas=Formulas("T * D * (F + B)", "(D - 1) / D", "1", "T * (D - 1) * (F + B)"),
    generate=lambda request: naive(request.ranks, request.microbatches, shares=request.option("shares")),
    options=(SHARES,),
    one_rank=True,
)
