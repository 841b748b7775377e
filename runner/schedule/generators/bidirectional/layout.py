"""Common functions for crossing pipelines, in which each stage is on several ranks, as twins with equal weights.

Micro-batch m takes pipeline m mod the number of pipelines, so that every pipeline gets micro-batches of each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.schedule.values import Action, Schedule

__all__ = ["nearer_pipe", "of_pipelines"]


def nearer_pipe(ranks: int, rank: int) -> int:
    """The pipeline, down (0) or up (1), whose first stage is nearer to ``rank``."""
    return 0 if rank < ranks // 2 else 1


def of_pipelines(
    name: str, placement: Sequence[Sequence[int]], rows: Iterable[Iterable[Action]], microbatches: int
) -> Schedule:
    """Make a schedule from each rank's list.

    Args:
        name: name of the schedule.
        placement: for each pipeline, stage -> rank.
        rows: for each rank, its compute in order.
        microbatches: number of micro-batches of one optimizer step, over all pipelines.
    """
    actions = tuple(tuple(row) for row in rows)
    return Schedule(
        name=name,
        placement=tuple(map(tuple, placement)),
        pipeline_of_microbatch=tuple(m % len(placement) for m in range(microbatches)),
        actions=actions,
        chunks=len(placement[0]) // len(actions),
    )
