"""Stages of one pipeline on different numbers of ranks: each rank of a stage takes every so-and-so-many-th micro-batch.

Micro-batch m of a stage with R replicas runs on replica m mod R, as in PipeDream's 1F1B-RR. The ranks of stage s follow
those of stage s - 1. A row of the placement says on which ranks one micro-batch runs; the rows repeat after the least
common multiple of the numbers of replicas.

Source: Narayanan et al., PipeDream, 2019, section 3.2 (1F1B-RR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from runner.errors import Problem
from runner.options import Option
from runner.schedule.generators.layout import backward, forward
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.values import Action, Schedule

__all__ = ["REPLICAS", "replicas_in", "replicas_of", "replicated", "replicated_problems", "warm_ups"]

REPLICAS = Option(
    "replicas",
    list[int],
    "ranks of each stage, which take its micro-batches in turns, as [2,1]; null = one",
    "[2,1]",
    elsewhere="The other schedules have an order for stages on one rank each",
)
"""For each stage, the number of ranks that hold it; they add up to the request's ranks."""

Order = Callable[[Sequence[Action], Sequence[Action], int], list[Action]]
"""Makes a rank's list of its forwards, its backwards and the number of forwards that come first."""


def replicated(name: str, replicas: Sequence[int], microbatches: int, order: Order) -> Schedule:
    """Generate a schedule of one window, in which each rank of a stage takes its turn.

    Args:
        name: its name.
        replicas: R of each stage, at least 1.
        microbatches: T, at least the largest R.
        order: makes the list of each rank.
    """
    rows = min(math.lcm(*replicas), microbatches)
    firsts = list(accumulate(replicas, initial=0))[:-1]
    placement = [[first + row % own for first, own in zip(firsts, replicas, strict=True)] for row in range(rows)]
    actions = []
    for stage, (own, ahead) in enumerate(zip(replicas, warm_ups(replicas), strict=True)):
        for replica in range(own):
            numbers = range(replica, microbatches, own)
            forwards, backwards = [forward(stage, m) for m in numbers], [backward(stage, m) for m in numbers]
            actions.append(tuple(order(forwards, backwards, ahead)))
    return Schedule(
        name=name,
        placement=tuple(map(tuple, placement)),
        pipeline_of_microbatch=tuple(m % rows for m in range(microbatches)),
        actions=tuple(actions),
    )


def warm_ups(replicas: Sequence[int]) -> list[int]:
    """For each stage, the forwards that its ranks run first: as many as keep all ranks of later stages busy."""
    return [-(-sum(replicas[stage + 1 :]) // own) for stage, own in enumerate(replicas)]


def replicas_of(schedule: Schedule) -> tuple[int, ...] | None:
    """For each stage, the ranks that take its micro-batches in turns; None if it is one, or if ranks hold several."""
    counts = tuple(len(schedule.copies_of(stage)) for stage in range(schedule.stages))
    return counts if max(counts) > 1 and sum(counts) == schedule.ranks else None


def replicas_in(request: ScheduleRequest) -> tuple[int, ...]:
    """The number of ranks of each stage that a request asks for."""
    asked = request.option("replicas")
    return tuple(asked) if asked is not None else (1,) * request.ranks


def replicated_problems(request: ScheduleRequest) -> list[Problem]:
    """The problems of a request's numbers of replicas."""
    asked = request.option("replicas")
    return [] if asked is None else list(_problems(request, list(asked)))


def _problems(request: ScheduleRequest, asked: list[int]) -> Iterator[Problem]:
    shown = f"[{','.join(map(str, asked))}]"
    if not asked or min(asked) < 1:
        rule = "must be a number of ranks for each stage, each at least 1"
        fix = f"schedule.replicas=[{','.join(['1'] * request.ranks)}]"
        yield Problem("schedule.replicas", shown, rule, "Every stage is on at least one rank", fix)
    elif sum(asked) != request.ranks:
        rule = f"must add up to parallelism.pipeline={request.ranks}"
        why = f"These are {sum(asked)} ranks: every rank of the pipeline holds one stage"
        yield Problem("schedule.replicas", shown, rule, why, f"parallelism.pipeline={sum(asked)}")
    elif max(asked) > request.microbatches:
        rule = f"must be at most schedule.microbatches={request.microbatches}"
        why = "The replicas of a stage take micro-batches in turns, and one would never get any"
        yield Problem("schedule.replicas", shown, rule, why, f"schedule.microbatches={max(asked)}")
