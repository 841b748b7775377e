"""Schedules of any placement, made without a generator: every rank's list is a part of one global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from runner.schedule.checking.schedule import check
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.values import Action, Op, Schedule


def looping(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod D."""
    return tuple(stage % ranks for stage in range(ranks * chunks))


def zigzag(ranks: int, chunks: int) -> tuple[int, ...]:
    """Back and forth: 0 1 2 2 1 0 …"""
    ways = (range(ranks), range(ranks - 1, -1, -1))
    return tuple(rank for chunk in range(chunks) for rank in ways[chunk % 2])


def in_order(
    placement: Sequence[int],
    microbatches: int,
    *,
    ahead: int = 2,
    delay: int | None = None,
    recomputed: Sequence[int] = (),
) -> Schedule:
    """Forwards of ``ahead`` micro-batches before the first backward, then one by one.

    Args:
        placement: rank of each stage.
        delay: weight gradients that wait on each rank before the first is computed; None: full backwards.
        recomputed: stages that compute their forward again.
    """
    ranks, stages = max(placement) + 1, len(placement)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    waiting: list[deque[Action]] = [deque() for _ in range(ranks)]
    for microbatch in range(microbatches + ahead):
        if microbatch < microbatches:
            for stage in range(stages):
                rows[placement[stage]].append(Action(Op.F, stage, microbatch))
        done = microbatch - ahead
        for stage in reversed(range(stages)) if done >= 0 else ():
            row = rows[placement[stage]]
            if stage in recomputed:
                row.append(Action(Op.R, stage, done))
            row.append(Action(Op.B if delay is None else Op.I, stage, done))
            if delay is not None:
                waiting[placement[stage]].append(Action(Op.W, stage, done))
                if len(waiting[placement[stage]]) > delay:
                    row.append(waiting[placement[stage]].popleft())
    for row, left in zip(rows, waiting, strict=True):
        row += left
    schedule = Schedule(
        name="in order",
        placement=(tuple(placement),),
        pipeline_of_microbatch=(0,) * microbatches,
        actions=tuple(map(tuple, rows)),
        chunks=stages // ranks,
    )
    assert check(schedule) == []
    return schedule


def assert_figures(schedule: Schedule, span: float, idle: float, inner: float, peaks: Sequence[float]) -> None:
    """With B = 2 F and free messages: the span, the bubble to three digits, the most inner idle, each rank's peak."""
    found = simulate(schedule, Costs())
    assert found.makespan == span
    assert abs(found.bubble_ratio - idle) <= 5e-4
    assert max(found.inner_idle) == inner
    assert found.peak_activations == tuple(peaks)
