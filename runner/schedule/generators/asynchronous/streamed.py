"""1F1B that never flushes, as a stream of windows: the order that several asynchronous schedules share.

On rank r of D, D - 1 - r forwards come first; then one forward and one backward in turn. A stage makes its optimizer
step after its last backward of a window. So the forward of micro-batch m comes when exactly the backwards of the
micro-batches before m - (D - 1 - r) are done: the newest weights that it can read lack the steps of the others.

A stage may be on several ranks, which take its micro-batches in turns and sum their gradients before each of its steps
(PipeDream's 1F1B-RR). The ranks of a stage then run the same numbers of each window's micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from runner.errors import Problem
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.generators.replicated import replicated, replicated_problems, warm_ups
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.values import Schedule

__all__ = ["newest_lags", "streamed", "streamed_problems"]

_WINDOWS_THAT_REPEAT = 4  # after those in which the pipeline fills, and with those in which it drains


def streamed(name: str, replicas: Sequence[int], microbatches: int, lags: tuple[int, ...]) -> Schedule:
    """Generate the first windows of the stream, as many as show how it repeats itself.

    Args:
        name: the schedule's name.
        replicas: the ranks of each stage; D is their sum.
        microbatches: T, the number of each optimizer step; a multiple of the numbers of ranks.
        lags: see :class:`runner.schedule.values.Schedule`.
    """
    windows = 2 * -(-(sum(replicas) - 1) // microbatches) + _WINDOWS_THAT_REPEAT
    numbers = range(windows * microbatches)
    return replace(
        replicated(name, replicas, len(numbers), in_turn),
        window_of_microbatch=tuple(m // microbatches for m in numbers),
        lags=lags,
    )


def newest_lags(replicas: Sequence[int]) -> tuple[int, ...]:
    """Per stage, the lag of a forward that reads the newest weights; D - 1 - s where every stage is on one rank."""
    return tuple(own * ahead for own, ahead in zip(replicas, warm_ups(replicas), strict=True))


def streamed_problems(request: ScheduleRequest) -> list[Problem]:
    """The problems of a request's numbers of ranks of each stage."""
    return replicated_problems(request) or list(_uneven_turns(request))


def _uneven_turns(request: ScheduleRequest) -> Iterator[Problem]:
    together = math.lcm(*(request.option("replicas") or (1,)))
    if request.microbatches % together:
        rule = f"must be a multiple of {together}"
        why = "The ranks of a stage run as many micro-batches of each step as each other, so that steps follow alike"
        fix = f"schedule.microbatches={-(-request.microbatches // together) * together}"
        yield Problem("schedule.microbatches", request.microbatches, rule, why, fix)
