"""Titles of drawings: a schedule, its size, and the costs with which it is drawn."""

from __future__ import annotations

from collections.abc import Iterator

from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Op, Schedule

__all__ = ["size_of", "title_of"]

_COSTED = (Op.F, Op.B, Op.I, Op.W)


def title_of(schedule: Schedule, costs: Costs | StageCosts) -> str:
    """For example ``1f1b: 4 ranks, 8 micro-batches, F 1, B 2``; durations of single stages are not told."""
    told = ", ".join(_costs(schedule, costs)) if isinstance(costs, Costs) else ""
    return f"{size_of(schedule)}, {told}" if told else size_of(schedule)


def size_of(schedule: Schedule) -> str:
    """The schedule's name, ranks, micro-batches and chunks."""
    each = f"{schedule.microbatches // (schedule.windows * schedule.parts)} micro-batches"
    batches = each if schedule.windows == 1 else f"{schedule.windows} steps of {each}"
    chunks = f", {schedule.chunks} chunks per rank" if schedule.chunks > 1 else ""
    return f"{schedule.name}: {schedule.ranks} ranks, {batches}{chunks}"


def _costs(schedule: Schedule, costs: Costs) -> Iterator[str]:
    """The costs that the schedule uses; messages only where they take time."""
    used = {action.op for row in schedule.actions for action in row}
    for op in _COSTED:
        if op in used:
            yield f"{op.value} {getattr(costs, op.value):g}"
    if costs.comm:
        yield f"messages {costs.comm:g}"
    kinds = schedule.filling.kinds if schedule.filling is not None else ()
    yield from dict.fromkeys(f"{kind.cost} {costs.of_fill(kind):g}" for kind in kinds)
