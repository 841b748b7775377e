"""``planner=beaumont``: the shortest period of a pipeline whose stages fit what a period makes them keep.

1F1B*: from the last stage back, stages and the messages between them join a group while their summed seconds are at
most the period; a stage of the g-th group keeps g micro-batches. For a period, a dynamic program over cuts keeps the
lowest (group, seconds in it) of the layers from each on, because what is lower stays lower; the period is bisected.
Devices that are no stage are replicas, whose sums come at the end of a step. Filling the pipeline and recomputation are
not modelled.

A device may also have layers that do not follow each other: each run of layers is a stage, and 1f1b runs them by
``schedule.placement``. Which layers are together is a hard problem, so that all assignments of up to 6 layers to up to
3 devices are looked at, each with the pattern of its shortest period (``periodic.py``), and no larger ones.

Source: Beaumont, Eyraud-Dubois and Shilova 2021, Pipelined model parallelism: complexity results and memory
considerations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from runner.plan.planners.kinds import CUTS, PlannerKind
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, with_microbatches
from runner.plan.planners.published.periodic import Pattern, Placed, shortest_pattern
from runner.plan.planners.values import PlanningAnswer, PlanningProblem

__all__ = ["PLANNER", "cut_for", "parted", "plan", "shortest_period"]

_HALVINGS = 30
_NEAR = 1e-7  # part of the period within which the bisection ends
_LAYERS, _RANKS = 6, 3  # the most for which stages need not follow each other
_SHORTER = 1e-3  # part of the period by which such stages must be shorter
_DIGITS = 4  # of a start, in periods

Label = tuple[int, float]
"""The group of the first of some layers, and the seconds in it."""


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    best = None
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    may_part = any(order.schedule == "1f1b" for order in problem.orders)
    for pipeline in divisors(problem.ranks):
        data = problem.ranks // pipeline
        if pipeline > len(problem.layers) or count % data:
            continue
        found = shortest_period(chain, pipeline)
        placed = parted(chain, pipeline, found[0] if found is not None else None) if may_part else None
        kinds = [placed] if placed is not None else []
        if found is not None:
            kinds.append((*found, tuple(range(pipeline)), ()))
        for period, stages, placement, starts in kinds:
            sums = [0.0] * pipeline
            for rank, (first, last) in zip(placement, stages, strict=True):
                sums[rank] += chain.sum_seconds(first, last + 1, data)
            made = count // data * period + max(sums), stages, data, placement, starts
            best = made if best is None else min(best, made)
    if best is None:
        return None
    seconds, stages, data, placement, starts = best
    answer = answer_of(
        "beaumont",
        problem,
        stages,
        replicas=(data,) * len(stages),
        tensor=(1,) * len(stages),
        microbatches=count // data,
        kept=(problem.divisions[0].kept[0].name,) * len(stages),
        seconds=seconds,
    )
    if not starts:
        return answer
    return replace(answer, pipeline=problem.ranks // data, placement=placement, starts=starts)


def parted(
    chain: Chain, ranks: int, period: float | None
) -> tuple[float, Stages, tuple[int, ...], tuple[float, ...]] | None:
    """The shortest period of stages of which a rank may have several, apart from each other.

    Args:
        chain: the layers.
        ranks: the ranks, each with at least one layer.
        period: seconds of the shortest period of one stage for each rank; None: none fits.

    Returns:
        The period in seconds, the stages, the rank of each, and the starts of forwards and of backwards in periods;
        None if none is shorter, or if there are too many layers or ranks to look at all.
    """
    layers, limit = len(chain.problem.layers), chain.problem.memory[chain.problem.ranks]
    if layers > _LAYERS or ranks > _RANKS:
        return None
    least = chain.seconds(0, layers) + 2 * sum(chain.message(end) for end in range(1, layers))
    best: tuple[Pattern, Stages, tuple[int, ...]] | None = None
    if period is not None:
        least = period * (1 - _SHORTER)
    for owners in _assignments(layers, ranks):
        runs = [(rank, [layer for layer, _ in run]) for rank, run in groupby(enumerate(owners), lambda each: each[1])]
        if len(runs) == ranks:
            continue  # one stage for each rank
        stages = tuple((own[0], own[-1]) for _, own in runs)
        rooms = [limit - chain.working()] * ranks
        placed = list[Placed]()
        for (rank, _), (first, last) in zip(runs, stages, strict=True):
            rooms[rank] -= chain.held(first, last + 1)
            forward, backward, saved = (chain.total(name, first, last + 1) for name in ("forward", "backward", "saved"))
            message = chain.message(last + 1) if last + 1 < layers else 0.0
            placed.append(Placed(rank, forward, backward, saved, message))
        found = shortest_pattern(placed, rooms, least)
        if found is not None:
            least = found.period * (1 - _NEAR)
            best = found, stages, tuple(rank for rank, _ in runs)
    if best is None:
        return None
    found, stages, placement = best
    return found.period, stages, placement, _in_periods(found)


def _assignments(layers: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to give layers to so many alike ranks, each with at least one; ranks are numbered as they come."""

    def more(owners: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        known = len({*owners})
        if len(owners) == layers:
            yield from (owners,) if known == ranks else ()
            return
        for rank in range(min(known + 1, ranks)):
            yield from more((*owners, rank))

    yield from more(())


def _in_periods(pattern: Pattern) -> tuple[float, ...]:
    """The starts in periods, as a command line has them: of few digits, and growing."""
    found, unit = list[float](), 10.0**-_DIGITS
    for start in pattern.starts:
        least = found[-1] + unit if found else 0.0
        found.append(round(max(start / pattern.period, least), _DIGITS))
    return tuple(found)


def shortest_period(chain: Chain, stages: int) -> tuple[float, Stages] | None:
    """The shortest period of so many stages and its cut; None if nothing fits even one micro-batch at a time."""
    layers = len(chain.problem.layers)
    low = chain.seconds(0, layers) / stages
    high = chain.seconds(0, layers) + 2 * sum(chain.message(end) for end in range(1, layers))
    found = cut_for(chain, stages, high)
    if found is None:
        return None
    for _ in range(_HALVINGS):
        if high - low <= _NEAR * high:
            break
        middle = (low + high) / 2
        made = cut_for(chain, stages, middle)
        if made is None:
            low = middle
        else:
            high, found = middle, made
    return high, found


def cut_for(chain: Chain, stages: int, period: float) -> Stages | None:
    """A cut that has this period and fits; None if there is none."""
    layers, limit = len(chain.problem.layers), chain.problem.memory[chain.problem.ranks]

    def joined(label: Label, seconds: float) -> Label:
        group, inside = label
        return (group, inside + seconds) if inside + seconds <= period else (group + 1, seconds)

    labels: dict[int, Label] = {layers: (1, 0.0)}
    came = list[dict[int, int]]()
    for stage in reversed(range(stages)):
        reached: dict[int, Label] = {}
        ends: dict[int, int] = {}
        for end, label in labels.items():
            message = 2 * chain.message(end) if end < layers else 0.0
            behind = joined(label, message)
            if message > period:
                continue
            for first in range(end - 1, stage - 1, -1):
                seconds = chain.seconds(first, end)
                made = joined(behind, seconds)
                if seconds > period or chain.peak(first, end, made[0]) > limit:
                    break
                if first not in reached or made < reached[first]:
                    reached[first], ends[first] = made, end
        labels = reached
        came.append(ends)
    if 0 not in labels:
        return None
    found, first = list[tuple[int, int]](), 0
    for ends in reversed(came):
        found.append((first, ends[first] - 1))
        first = ends[first]
    return tuple(found)


PLANNER = PlannerKind(
    name="beaumont",
    plan=plan,
    axes=(CUTS,),
    chooses="cut, depth, stages that are apart",
    by="shortest period that fits: 1F1B*, and all assignments of up to 6 layers to 3 devices",
    lacks="filling the pipeline, recomputation",
    position=160,
)
