"""What generators of several crossing pipelines share: each stage lives on several ranks, as twins of equal weights.

Micro-batch m takes pipeline m mod the number of pipelines, so that every pipeline has some of each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.schedule.values import Action, Schedule

__all__ = ["nearer_pipe", "of_pipelines"]


def nearer_pipe(ranks: int, rank: int) -> int:
    """Of a pipeline down (0) and one up (1), the one whose first stage is nearer to ``rank``."""
    return 0 if rank < ranks // 2 else 1


def of_pipelines(
    name: str, placement: Sequence[Sequence[int]], rows: Iterable[Iterable[Action]], microbatches: int
) -> Schedule:
    """The schedule of each rank's list.

    Args:
        name: of the schedule.
        placement: per pipeline, stage -> rank.
        rows: per rank, its compute in order.
        microbatches: of one optimizer step, over all pipelines.
    """
    actions = tuple(tuple(row) for row in rows)
    return Schedule(
        name=name,
        placement=tuple(map(tuple, placement)),
        pipeline_of_microbatch=tuple(m % len(placement) for m in range(microbatches)),
        actions=actions,
        chunks=len(placement[0]) // len(actions),
    )
