"""A schedule with only forwards, for validation."""

from __future__ import annotations

from runner.schedule.values import Action, Op, Schedule

__all__ = ["forward_only"]


def forward_only(layout: Schedule | int, microbatches: int) -> Schedule:
    """Generate the forwards of all micro-batches, in order.

    Args:
        layout: the training schedule whose placement to keep, or a number of ranks with one stage each. A rank with
            several stages runs all micro-batches through the first, then the next. If there are several pipelines,
            all micro-batches go through the first.
        microbatches: number of micro-batches of this pass, which may differ from that of the training schedule.
    """
    placement: tuple[tuple[int, ...], ...]
    if isinstance(layout, int):
        ranks, chunks, placement = layout, 1, (tuple(range(layout)),)
    else:
        ranks, chunks, placement = layout.ranks, layout.chunks, layout.placement[:1]
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for stage, rank in enumerate(placement[0]):
        rows[rank] += [Action(Op.F, stage, m) for m in range(microbatches)]
    return Schedule(
        name="forward_only",
        placement=placement,
        pipeline_of_microbatch=(0,) * microbatches,
        actions=tuple(map(tuple, rows)),
        chunks=chunks,
        backward=False,
    )
