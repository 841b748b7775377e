"""AvgPipe: parallel pipelines on the same ranks, each with weights of its own, drawn together by an average.

Every rank holds its stage P + 1 times: the weights of each pipeline, and their average. Each pipeline takes every P-th
micro-batch, and is synchronous in itself. A rank takes the actions of all its pipelines in turn, so that it works for
one while it waits for another; all are flushed at the end of a step, so that together they have 1F1B's bubble.
``schedule.advance`` forwards come earlier than 1F1B's. After each optimizer step the average and the pipelines' weights
are drawn together: see :mod:`runner.optim.states.elastic`. With one rank this is EASGD of P workers in one process.

Sources: Chen et al., "Elastic Averaging for Efficient Pipelined DNN Training", 2023, of which only a summary was read;
Zhang et al., "Deep Learning with Elastic Averaging SGD", 2015. The order in which pipelines take turns is our own.
"""

from __future__ import annotations

from dataclasses import replace

from runner.errors import Problem
from runner.options import Option
from runner.schedule.generators.bidirectional.layout import of_pipelines
from runner.schedule.generators.forms import whole_number
from runner.schedule.generators.layout import backward, forward, looping
from runner.schedule.generators.one_directional.one_f_one_b import in_turn
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.simulation.list_scheduling import Clock, list_schedule
from runner.schedule.values import Action, Schedule

__all__ = ["DEFAULT_PIPES", "FORMS", "SPEC", "avgpipe"]

DEFAULT_PIPES = 2

FORMS = ("easgd", "updates")
"""The forms of averaging; the first one is the default."""


def avgpipe(ranks: int, microbatches: int, pipes: int = DEFAULT_PIPES, advance: int = 0) -> Schedule:
    """Generate one step of all pipelines.

    Args:
        ranks: D.
        microbatches: T, the number of each step over all pipelines, a multiple of ``pipes``.
        pipes: P, the number of pipelines.
        advance: the number of forwards that each rank makes earlier than 1F1B would.
    """
    rows = [
        [_of_pipe(rank, ranks, range(pipe, microbatches, pipes), advance) for pipe in range(pipes)]
        for rank in range(ranks)
    ]
    draft = replace(
        of_pipelines("avgpipe", [looping(ranks, 1)] * pipes, [sum(row, []) for row in rows], microbatches),
        own_weights=True,
    )
    before = {
        action: (place, earlier)
        for row in rows
        for pipe in row
        for place, (earlier, action) in enumerate(zip([None, *pipe], pipe, strict=False))
    }

    def urgency(clock: Clock, rank: int, action: Action) -> tuple[float, ...] | None:
        place, earlier = before[action]
        return (place,) if earlier is None or earlier in clock.started else None

    costs = StageCosts(F=(1.0,) * ranks, B=(2.0,) * ranks, comm=(0.0,) * (ranks - 1))
    return list_schedule(draft, costs, urgency)


def _of_pipe(rank: int, ranks: int, numbers: range, advance: int) -> list[Action]:
    """A rank's actions of one pipeline, whose micro-batches are given."""
    forwards, backwards = [forward(rank, m) for m in numbers], [backward(rank, m) for m in numbers]
    return in_turn(forwards, backwards, min(ranks - 1 - rank + advance, len(numbers)))


def _generate(request: ScheduleRequest) -> Schedule:
    pipes, advance = request.option("pipes") or DEFAULT_PIPES, request.option("advance") or 0
    return avgpipe(request.ranks, request.microbatches, pipes, advance)


def _problems(request: ScheduleRequest) -> list[Problem]:
    problems, form = [], request.option("variant")
    if form not in (None, *FORMS):
        why = "It says what the average takes in: the pipelines' distances from it, or their updates"
        rule = f"must be one of {', '.join(FORMS)}"
        problems.append(Problem("schedule.variant", form, rule, why, "schedule.variant=easgd"))
    pipes = request.option("pipes") or DEFAULT_PIPES
    if request.microbatches % pipes:
        why = f"Each of {pipes} pipelines takes as many micro-batches of a step"
        more = -(-request.microbatches // pipes) * pipes
        path = "schedule.microbatches"
        problems.append(
            Problem(path, request.microbatches, "must be a multiple of schedule.pipes", why, f"{path}={more}")
        )
    return problems


SPEC = ScheduleSpec(
    name="avgpipe",
    position=250,
    description="parallel pipelines on the same ranks, each with its own weights, drawn together by an average",
    summary="`schedule.pipes` (2) pipelines on the same ranks; each trains its own weights, which an average draws "
    "together after every step, when all are flushed: 1f1b's bubble, the weights `pipes` + 1 times, gradients and "
    "optimizer states `pipes` times",
    source="Chen et al., AvgPipe, 2023, from a summary; Zhang et al., EASGD, 2015",
    formulas=None,
    generate=_generate,
    one_rank=True,
    constraint=_problems,
    options=(
        Option(
            "variant",
            str,
            "what the average takes in: easgd (the pipelines' distances from it), updates; null = easgd",
            FORMS[0],
            elsewhere="The other schedules have one form",
            legal=FORMS,
        ),
        whole_number(
            "pipes",
            1,
            "parallel pipelines; null = 2",
            example=DEFAULT_PIPES,
            elsewhere="The other schedules have as many pipelines as they need",
            legal=(2, 3),
        ),
        whole_number(
            "advance",
            0,
            "forwards that each rank makes earlier than 1f1b would; null = 0",
            example=1,
            elsewhere="The warm-up of the other schedules is fixed",
            legal=(0, 1),
        ),
        Option(
            "elasticity",
            float,
            "how far the average draws each pipeline after a step; null = 1 / pipes",
            "0.5",
            "must lie between 0 and 1",
            lambda value: not 0 <= value <= 1,
            why="It is the part of its distance from the average by which each pipeline is drawn to it",
            fix="schedule.elasticity=null",
            elsewhere="The weights of the other schedules are not averaged",
            legal=(0.25,),
        ),
    ),
    kind="asynchronous",
    averaged_pipes=DEFAULT_PIPES,
    searched=False,
)
