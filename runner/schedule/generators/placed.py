"""Stages of one pipeline on ranks that are named one by one: a rank's stages need not follow each other.

The pipeline is a pattern that repeats: each micro-batch does what the one before it does, one period later, and
``schedule.starts`` says when, in periods. Each rank runs its actions in the order of their starts. Without starts, they
are found here for actions of equal length: one after the other starts as soon as its rank is free in every period,
which is as long as the rank with most stages needs. With one stage on each rank, in order, this is 1F1B.

Source: Beaumont, Eyraud-Dubois and Shilova, Pipelined model parallelism, 2021, whose 1F1B* is such a pattern.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count, pairwise

from runner.errors import Problem
from runner.options import Option, shown
from runner.schedule.generators.layout import backward, forward
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.values import Action, Schedule

__all__ = ["PLACEMENT", "STARTS", "found_starts", "placed", "placed_problems"]

PLACEMENT = Option(
    "placement",
    list[int],
    "the rank of each stage, as [0,1,0]; null = stage s is on rank s",
    "[0,1,0]",
    elsewhere="The other schedules have an order for a placement of their own",
)
"""For each stage, its rank; every rank has at least one."""

STARTS = Option(
    "starts",
    list[float],
    "when each stage begins a micro-batch, in periods: all forwards, then all backwards from the last; null = found",
    "[0,0.2,0.4,0.6,1,1.4]",
    elsewhere="The other schedules have an order of their own",
)
"""The starts of the forwards from the first stage to the last, and then of the backwards from the last to the first."""


def placed(name: str, placement: Sequence[int], microbatches: int, starts: Sequence[float] | None = None) -> Schedule:
    """Generate the schedule of a placement.

    Args:
        name: its name.
        placement: stage -> rank.
        microbatches: T.
        starts: the growing starts of all forwards and then of the backwards from the last stage, in periods; None: they
            are found.
    """
    begun = found_starts(placement) if starts is None else starts
    stages = range(len(placement))
    made = [*((forward, stage) for stage in stages), *((backward, stage) for stage in reversed(stages))]
    timed: list[list[tuple[float, int, Action]]] = [[] for _ in range(max(placement) + 1)]
    for microbatch in range(microbatches):
        for place, ((make, stage), start) in enumerate(zip(made, begun, strict=True)):
            timed[placement[stage]].append((microbatch + start, place, make(stage, microbatch)))
    counts = {*Counter(placement).values()}
    return Schedule(
        name=name,
        placement=(tuple(placement),),
        pipeline_of_microbatch=(0,) * microbatches,
        actions=tuple(tuple(action for _, _, action in sorted(row)) for row in timed),
        chunks=counts.pop() if len(counts) == 1 else 1,
    )


def found_starts(placement: Sequence[int]) -> list[float]:
    """The starts of a pattern of equal actions, in periods: each is as early as its rank is free in every period."""
    period = 2 * max(Counter(placement).values())
    taken, starts, ready = set[tuple[int, int]](), list[float](), 0
    for rank in (*placement, *reversed(placement)):
        start = next(each for each in count(ready) if (rank, each % period) not in taken)
        taken.add((rank, start % period))
        starts.append(start / period)
        ready = start + 1
    return starts


def placed_problems(request: ScheduleRequest) -> Iterator[Problem]:
    """The problems of a request's placement and starts."""
    asked, starts, ranks = request.option("placement"), request.option("starts"), request.ranks
    path, rule = "schedule.placement", f"must give each of the ranks 0 to {ranks - 1} at least one stage"
    others = [key for key in ("replicas", "shares") if request.option(key) is not None]
    if asked is None:
        if starts is not None:
            why = "Without it the order is that of equal stages"
            yield Problem(
                "schedule.starts", shown(starts), "belongs to schedule.placement", why, "schedule.starts=null"
            )
    elif {*asked} != {*range(ranks)}:
        top = max(asked, default=0)
        whole = top > 0 and {*asked} == {*range(top + 1)}
        every = shown(list(range(ranks)))
        fix = f"parallelism.pipeline={top + 1}" if whole else f"{path}={every}"
        yield Problem(path, shown(asked), rule, "Every rank of the pipeline holds a stage, and no other does", fix)
    elif others:
        why = "Each stage is on one rank, and its micro-batches have one size"
        yield Problem(path, shown(asked), f"must be null with schedule.{others[0]}", why, f"{path}=null")
    elif starts is not None and (len(starts) != 2 * len(asked) or not _grow(starts)):
        rule = f"must be {2 * len(asked)} growing numbers, a forward's and a backward's for each stage"
        why = "A micro-batch goes forward through all stages, and then back"
        yield Problem("schedule.starts", shown(starts), rule, why, "schedule.starts=null")


def _grow(starts: Sequence[float]) -> bool:
    return all(one < other < math.inf for one, other in pairwise(starts))
