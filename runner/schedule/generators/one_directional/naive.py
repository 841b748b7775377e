"""Naive model parallelism: one micro-batch at a time through all ranks and back."""

from __future__ import annotations

from runner.schedule.generators.layout import backward, forward, looping, of_one_pipeline
from runner.schedule.values import Schedule

__all__ = ["naive"]


def naive(ranks: int, microbatches: int, name: str = "naive") -> Schedule:
    """F and B of each micro-batch in turn. On one rank this is plain gradient accumulation."""
    rows = [[op(rank, m) for m in range(microbatches) for op in (forward, backward)] for rank in range(ranks)]
    return of_one_pipeline(name, looping(ranks, 1), rows, microbatches)
