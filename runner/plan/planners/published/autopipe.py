"""``planner=autopipe``: the cut with the shortest 1F1B step of 2 P micro-batches, from the slowest stage's position.

The least slowest stage by dynamic programming comes first. Then cuts are played without messages, and changed around
the master stage, the last one that is never idle in the steady phase: the stages after it are evened by moving their
first layers forward, its own first layer moves to the stage before, and its last one to the stage after, while the
stages before it are cut anew by the dynamic program. Every boundary is also moved by one layer. A step of T micro-
batches takes T - 2 P times the slowest stage more. The paper's depth is given: here it is the best of those whose cut
fits. At last the first micro-batches are cut in halves, as few as shorten the step most, if they have an even number
of samples.

Source: Liu et al. 2022, AutoPipe, and its public partitioner in Merak, which slices nothing: how many are halved is
found here by playing each number. The moves of every boundary are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from runner.plan.planners.kinds import CUTS, PlannerKind
from runner.plan.planners.orders import Orders, PlayedOrder
from runner.plan.planners.published.chain import (
    Chain,
    answer_of,
    divisors,
    even_cut,
    least_in_order,
    with_microbatches,
)
from runner.plan.planners.values import Order, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import BatchedCosts

__all__ = ["PLANNER", "best_cut", "halved", "length", "master_stage", "plan", "sliced"]

Cut = tuple[int, ...]  # the first layer of each stage, and the number of layers

_MOST = 200  # cuts whose neighbours are played


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    orders, found = Orders(), list[tuple[float, int, Cut, int]]()
    chain = Chain(problem, problem.divisions[0], problem.batch / count)
    for pipeline in divisors(problem.ranks):
        data = problem.ranks // pipeline
        if pipeline > len(problem.layers) or count % data:
            continue
        cut, seconds = best_cut(chain, pipeline, orders)
        more = count // data - 2 * pipeline
        slowest = max(chain.seconds(first, end) for first, end in pairwise(cut))
        peaks = [chain.peak(first, end, pipeline - at) for at, (first, end) in enumerate(pairwise(cut))]
        if max(peaks) > problem.memory[problem.ranks]:
            continue
        sums = max(chain.sum_seconds(first, end, data) for first, end in pairwise(cut))
        halves, saved = sliced(chain, cut, count // data, orders)
        found.append((seconds + more * slowest + sums - saved, pipeline, cut, halves))
    if not found:
        return None
    seconds, pipeline, cut, halves = min(found)
    data = problem.ranks // pipeline
    return answer_of(
        "autopipe",
        problem,
        tuple((first, end - 1) for first, end in pairwise(cut)),
        replicas=(data,) * pipeline,
        tensor=(1,) * pipeline,
        microbatches=count // data + halves,
        shares=halved(count // data, halves) if halves else (),
        kept=(problem.divisions[0].kept[0].name,) * pipeline,
        seconds=seconds,
    )


def halved(microbatches: int, first: int) -> tuple[int, ...]:
    """The shares of so many micro-batches, of which the first ones are two halves each."""
    return (1,) * (2 * first) + (2,) * (microbatches - first)


def sliced(chain: Chain, cut: Cut, microbatches: int, orders: Orders) -> tuple[int, float]:
    """How many of the first micro-batches are halved, the fewest that save most, and the seconds that this saves.

    A half takes half as long and, each time, what does not depend on the samples: of the slowest stage, and the
    engine's for an action.
    """
    pipeline, samples = len(cut) - 1, chain.samples
    if pipeline == 1 or samples % 2 or chain.problem.microbatches is not None:
        return 0, 0.0
    half = Chain(chain.problem, chain.division, samples / 2)
    again = max(2 * half.seconds(first, end) - chain.seconds(first, end) for first, end in pairwise(cut))
    played = min(microbatches, 2 * pipeline)  # halves change how the pipeline fills, and nothing later
    times = list[float]()
    for first in range(min(played, pipeline)):
        shares = halved(played, first)
        order = orders.of(Order("1f1b", 1), pipeline, len(shares), shares=shares)
        assert order is not None  # 1F1B exists for all numbers
        (whole,) = length(chain, order, [cut], size=played / len(shares))
        times.append(whole + first * (again + 2 * chain.problem.overhead))
    least = min(times)
    best = next(first for first, each in enumerate(times) if each <= least * (1 + 1e-9))
    return best, times[0] - times[best]


def best_cut(chain: Chain, pipeline: int, orders: Orders) -> tuple[Cut, float]:
    """The cut that was found, and its seconds of a step of 2 ``pipeline`` micro-batches."""
    layers = len(chain.problem.layers)
    order = orders.of(Order("1f1b", 1) if pipeline > 1 else None, pipeline, 2 * pipeline)
    assert order is not None  # 1F1B exists for all numbers
    seconds = chain.ranges("forward") + chain.ranges("backward")
    known: dict[tuple[int, int], Cut] = {}

    def before(end: int, stages: int) -> Cut | None:
        """The least slowest cut of the first layers."""
        if not 0 < stages <= end:
            return (0,) if stages == end == 0 else None
        if (end, stages) not in known:
            found = least_in_order([seconds[: end + 1, : end + 1]] * stages)
            assert found is not None  # there are as many layers as stages
            known[end, stages] = (0, *(last + 1 for _, last in found[1]))
        return known[end, stages]

    def around(cut: Cut) -> Iterator[Cut]:
        master = master_stage(chain, cut)
        evened = _evened(chain, cut, master)
        yield evened
        for at in (master, master + 1):
            moved = evened[at] + (1 if at == master else -1)  # the master's first layer forward, or its last one back
            front = before(moved, at) if 0 < at < pipeline and moved < evened[at + 1] else None
            if front is not None:
                yield (*front, *evened[at + 1 :])
        for at in range(1, pipeline):
            for by in (-1, 1):
                if cut[at - 1] < cut[at] + by < cut[at + 1]:
                    yield (*cut[:at], cut[at] + by, *cut[at + 1 :])

    start = before(layers, pipeline)
    assert start is not None
    even = (0, *(last + 1 for _, last in even_cut(layers, pipeline)))
    seen = dict(zip((start, even), length(chain, order, [start, even]), strict=True))
    queue = [start, even]
    for cut in queue[:_MOST]:
        least = min(seen.values())
        new = [each for each in dict.fromkeys(around(cut)) if each not in seen]
        if new:
            times = length(chain, order, new)
            seen |= dict(zip(new, times, strict=True))
            better = sorted((each for each in new if seen[each] < least), key=lambda each: seen[each])
            queue += better
    best = min(seen, key=lambda each: (seen[each], each))
    return best, seen[best]


def length(chain: Chain, order: PlayedOrder, cuts: list[Cut], size: float = 1.0) -> list[float]:
    """Seconds of 1F1B for each cut, without messages; its micro-batches are in the mean ``size`` of the chain's."""
    firsts = np.array(cuts, dtype=np.int64).T
    forward, backward = chain.ranges("forward"), chain.ranges("backward")
    f, b = size * forward[firsts[:-1], firsts[1:]], size * backward[firsts[:-1], firsts[1:]]
    costs = BatchedCosts(f, b, b, b, np.zeros((max(len(firsts) - 2, 0), len(cuts))))
    found: list[float] = order.play(costs, 2 * order.ranks).max(axis=0).tolist()
    return found


def master_stage(chain: Chain, cut: Cut) -> int:
    """The last stage that is never idle between its first backward and its last forward."""
    stages, count = len(cut) - 1, 2 * (len(cut) - 1)
    f = [chain.total("forward", first, end) for first, end in pairwise(cut)]
    b = [chain.total("backward", first, end) for first, end in pairwise(cut)]
    forwards, backwards, idle = _played(f, b, stages, count)
    slack = 1e-9 * sum(f + b)
    busy = [stage for stage in range(stages) if idle[stage] <= slack]
    slowest = max(range(stages), key=lambda stage: (f[stage] + b[stage], stage))
    return max(busy, default=slowest)


def _played(
    f: list[float], b: list[float], stages: int, count: int
) -> tuple[list[list[float]], list[list[float]], list[float]]:
    """The ends of forwards and backwards of 1F1B by stage, and each stage's idle seconds in its steady phase."""
    ends_f = [[0.0] * count for _ in range(stages)]
    ends_b = [[0.0] * count for _ in range(stages)]
    rows = []
    for stage in range(stages):
        warm = min(stages - stage, count)
        turns = [("f", m) for m in range(warm)]
        for m in range(count):
            turns.append(("b", m))
            turns += [("f", m + warm)] if m + warm < count else []
        rows.append(turns)
    free, idle, place, left = [0.0] * stages, [0.0] * stages, [0] * stages, 2 * stages * count
    done_f, done_b = [0] * stages, [0] * stages
    while left:
        for stage in range(stages):
            while place[stage] < len(rows[stage]):
                kind, m = rows[stage][place[stage]]
                beside = stage - 1 if kind == "f" else stage + 1
                done = done_f if kind == "f" else done_b
                ends = ends_f if kind == "f" else ends_b
                if 0 <= beside < stages and done[beside] <= m:
                    break
                ready = ends[beside][m] if 0 <= beside < stages else 0.0
                start = max(free[stage], ready)
                if done_b[stage] and done_f[stage] < count:
                    idle[stage] += start - free[stage]
                free[stage] = ends[stage][m] = start + (f if kind == "f" else b)[stage]
                done[stage] += 1
                place[stage] += 1
                left -= 1
    return ends_f, ends_b, idle


def _evened(chain: Chain, cut: Cut, master: int) -> Cut:
    """The first layers of the stages after the master go to the stage before, as long as those in front are behind."""
    made, stages = list(cut), len(cut) - 1
    goal = chain.seconds(made[master], made[master + 1])
    for stage in range(master + 1, stages - 1):
        while made[stage + 2] - made[stage + 1] > 1:
            taken = chain.seconds(made[stage], made[stage + 1] + 1)
            rest = chain.seconds(made[stage + 1], made[-1]) / (stages - stage - 1)
            if taken > goal or chain.seconds(made[stage], made[stage + 1]) >= rest:
                break
            made[stage + 1] += 1
    return tuple(made)


PLANNER = PlannerKind(
    name="autopipe",
    plan=plan,
    axes=(CUTS,),
    chooses="cut, depth, halves of the first micro-batches",
    by="moves around the slowest stage, played without messages",
    lacks="messages, recomputation",
    position=80,
)
