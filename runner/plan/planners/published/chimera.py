"""``planner=chimera``: every depth and width of pipelines in two directions, with the largest micro-batch that fits.

Blocks are as even as possible. The step is forwards and backwards, each with its message, times their numbers on the
critical path of the order, and what the sums of gradients take beyond the ranks' last bubble. Everything is run again
where nothing fits otherwise. Depths are even, and the micro-batches a multiple of them.

Source: Li and Hoefler 2021, Chimera, section 3.4 (reconstruction: the numbers on the path are counted in its order).
"""

from __future__ import annotations

import numpy as np

from runner.plan.planners.kinds import AGAIN, CUTS, REPLICAS, PlannerKind
from runner.plan.planners.orders import Orders, PlayedOrder
from runner.plan.planners.published.chain import Chain, Stages, answer_of, divisors, even_cut, ways_of
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Order, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import BatchedCosts

__all__ = ["PLANNER", "on_the_path", "plan"]

_ORDER = Order("chimera", 1)
_LITTLE = 1e-6  # by which one kind of action is made longer: what the step then takes more counts its actions


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    orders, found = Orders(), list[PlanningAnswer]()
    for depth in divisors(problem.ranks):
        if depth % 2 == 0 and depth <= len(problem.layers):
            made = [_greedy(problem, depth, way, orders) for way in dict.fromkeys(ways_of(problem))]
            found += [each for each in made if each is not None][:1]
    return min(found, key=lambda each: each.seconds, default=None)


def _greedy(problem: PlanningProblem, depth: int, way: int, orders: Orders) -> PlanningAnswer | None:
    """The answer of a depth with the fewest micro-batches with which it fits; None if it does with none."""
    width, stages, division = problem.ranks // depth, even_cut(len(problem.layers), depth), problem.divisions[0]
    for count in divisors(problem.batch // width) if problem.batch % width == 0 else []:
        order = orders.of(_ORDER, depth, count) if count % depth == 0 else None
        if order is None:
            continue
        samples = problem.batch / (width * count)
        table = StageTable(problem, Setting(division, samples, count, width, None))
        cuts = np.array([[first] for first, _ in stages] + [[len(problem.layers)]], dtype=np.int64)
        peak = float(table.peaks(Candidates(cuts, np.full((depth, 1), way, dtype=np.int64)), order).max())
        if peak <= problem.memory[problem.ranks]:
            return answer_of(
                "chimera",
                problem,
                stages,
                replicas=(width,) * depth,
                tensor=(1,) * depth,
                microbatches=count,
                kept=(division.kept[way].name,) * depth,
                seconds=_seconds(Chain(problem, division, samples, way), stages, order, width),
                peak_bytes=peak,
                order=_ORDER,
            )
    return None


def on_the_path(order: PlayedOrder, forward: float, backward: float) -> tuple[float, float]:
    """How many forwards and backwards of such lengths the step waits for."""
    longer = np.array([0.0, 1.0, 0.0]) * _LITTLE * forward, np.array([0.0, 0.0, 1.0]) * _LITTLE * forward
    f, b = np.full((order.stages, 1), forward) + longer[0], np.full((order.stages, 1), backward) + longer[1]
    assert order.compiled is not None  # Chimera has a pipeline
    ends = order.compiled.makespan(BatchedCosts(f, b, b, b, np.zeros((order.stages - 1, 3))))
    forwards, backwards = ((ends[1:] - ends[0]) / (_LITTLE * forward)).tolist()
    return round(forwards), round(backwards)


def _seconds(chain: Chain, stages: Stages, order: PlayedOrder, width: int) -> float:
    """Seconds of a step by the paper's sum."""
    message = max(chain.message(last + 1) for _, last in stages[:-1])
    forward = max(chain.total("forward", first, last + 1) for first, last in stages) + message
    backward = max(chain.total("backward", first, last + 1) for first, last in stages) + message
    forwards, backwards = on_the_path(order, forward, backward)
    each = np.full((order.stages, 1), 1.0)
    assert order.compiled is not None  # Chimera has a pipeline
    nothing = np.zeros((order.stages - 1, 1))
    ends = order.compiled.play(BatchedCosts(forward * each, backward * each, backward * each, each, nothing))[:, 0]
    late = 0.0
    for rank, own in enumerate(order.stages_of):
        sums = sum(chain.sum_seconds(stages[at][0], stages[at][1] + 1, width * order.copies) for at in own)
        late = max(late, sums - float(ends.max() - ends[rank]))
    return forwards * forward + backwards * backward + late


PLANNER = PlannerKind(
    name="chimera",
    plan=plan,
    axes=(
        REPLICAS,
        CUTS,
        AGAIN,
    ),
    chooses="depth, micro-batch, recomputation of all or none",
    by="enumeration of even blocks, its schedule's critical path",
    lacks="uneven blocks",
    position=120,
)
