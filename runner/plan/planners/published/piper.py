"""``planner=piper``: the least slowest stage over cuts, replicas, parts of layers and recomputation layer by layer.

A dynamic program over the layers that are left, the devices, and the replicas of this and all later stages, which say
how many micro-batches a stage keeps. Which layers run again is a knapsack: if a stage does not fit, layers are taken
by the least seconds for a byte until it does. Time for a micro-batch: compute and messages over the replicas, and the
sum of gradients over all micro-batches. Filling the pipeline is not modelled, and the order of work is open.

Source: Tarnawski et al. 2021, Piper, and its public program (here on chains;
:mod:`runner.plan.planners.published.piper_graph` takes graphs).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runner.plan.planners.kinds import AGAIN, CUTS, PARTS, REPLICAS, PlannerKind
from runner.plan.planners.published.chain import Chain, answer_of, divisors, ways_of, with_microbatches
from runner.plan.planners.values import Division, PlanningAnswer, PlanningProblem
from runner.schedule.simulation.batched import Numbers

__all__ = ["PLANNER", "PiperStage", "plan", "search"]


@dataclass(frozen=True, slots=True)
class PiperStage:
    """A stage: its layers from ``first`` up to ``end``, parts of layers, replicas, and the layers that run again."""

    first: int
    end: int
    tensor: int
    replicas: int
    again: tuple[int, ...]


def plan(problem: PlanningProblem) -> PlanningAnswer | None:
    """The answer to a problem; None if nothing fits."""
    return with_microbatches(problem, _plan)


def _plan(problem: PlanningProblem, count: int) -> PlanningAnswer | None:
    found = search(problem, count)
    if found is None:
        return None
    seconds, stages = found
    names, (keep, rerun) = [kept.name for kept in problem.divisions[0].kept], ways_of(problem)
    return answer_of(
        "piper",
        problem,
        tuple((stage.first, stage.end - 1) for stage in stages),
        replicas=tuple(stage.replicas for stage in stages),
        tensor=tuple(stage.tensor for stage in stages),
        microbatches=max(1, count // max(stage.replicas for stage in stages)),
        count=count,
        kept=tuple(names[rerun if stage.again else keep] for stage in stages),
        seconds=count * seconds,
        again=tuple(layer for stage in stages for layer in stage.again),
    )


class _Ranges:
    """Every range of layers of one division: its seconds, and what running layers again adds to them."""

    def __init__(self, problem: PlanningProblem, division: Division, samples: float, most: int) -> None:
        keep, rerun = ways_of(problem)
        self.whole, less = Chain(problem, division, samples, keep), Chain(problem, division, samples, rerun)
        layers = range(len(problem.layers))
        self._saves = np.array(
            [self.whole.total("saved", at, at + 1) - less.total("saved", at, at + 1) for at in layers]
        )
        extra = [less.seconds(at, at + 1) - self.whole.seconds(at, at + 1) for at in layers]
        self._extra = np.maximum(np.array(extra), 0.0)
        useful = [at for at in layers if self._saves[at] > 0]
        self._order = np.array(sorted(useful, key=lambda at: self._extra[at] / self._saves[at]), dtype=np.int64)
        self._limit = problem.memory[problem.ranks] - max(self.whole.working(), less.working())
        self._flights = np.arange(1, most + 1)

    def _lacks(self, first: int, end: int) -> Numbers:
        """Bytes that each micro-batch must save, by how many are in flight."""
        room = (self._limit - self.whole.held(first, end)) / self._flights
        found: Numbers = self.whole.total("saved", first, end) - room
        return found

    def _taken(self, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The layers of a range in the order in which they are taken, and how many by the number in flight."""
        own = self._order[(self._order >= first) & (self._order < end)]
        saved = np.concatenate([[0.0], np.cumsum(self._saves[own])])
        lacks = self._lacks(first, end)
        return own, np.where(lacks <= 0, 0, np.searchsorted(saved, lacks - 1e-9 * np.abs(lacks)))

    def added(self, first: int, end: int) -> Numbers:
        """Seconds that are added, by the number in flight; infinite where nothing fits."""
        own, taken = self._taken(first, end)
        seconds = np.concatenate([[0.0], np.cumsum(self._extra[own]), [np.inf]])
        found: Numbers = seconds[taken]
        return found

    def again(self, first: int, end: int, in_flight: int) -> tuple[int, ...]:
        """The layers that run again."""
        own, taken = self._taken(first, end)
        return tuple(sorted(own[: int(taken[in_flight - 1])].tolist()))


def search(problem: PlanningProblem, count: int) -> tuple[float, tuple[PiperStage, ...]] | None:
    """The least seconds of the slowest stage for one of ``count`` micro-batches, and its stages; None: nothing fits."""
    layers, devices, most = len(problem.layers), problem.ranks, min(problem.ranks, count)
    samples = problem.batch / count
    ranges = [_Ranges(problem, division, samples, most) for division in problem.divisions]
    best = np.full((layers + 1, devices + 1, most + 1), np.inf)
    best[layers, 0, 0] = 0.0
    came = np.zeros((layers, devices + 1, most + 1, 3), dtype=np.int64)  # end, place of the division, replicas
    options = [
        (place, division.tensor, data)
        for place, division in enumerate(problem.divisions)
        for data in divisors(count)
        if data <= most and data * division.tensor <= devices
    ]
    for first in reversed(range(layers)):
        for end in range(first + 1, layers + 1):
            added = [each.added(first, end) for each in ranges]
            for place, tensor, data in options:
                after = best[end, : devices + 1 - tensor * data, : most + 1 - data]
                flights = -(-np.arange(data, most + 1) // data)
                seconds = _seconds(ranges[place].whole, first, end, data, count) + added[place][flights - 1] / data
                worst = np.maximum(after, seconds[None, :])
                mine = best[first, tensor * data :, data:]
                better = worst < mine
                if better.any():
                    mine[better] = worst[better]
                    came[first, tensor * data :, data:][better] = end, place, data
    left, sharing = (int(each) for each in np.unravel_index(best[0].argmin(), best[0].shape))
    least = float(best[0, left, sharing])
    if not np.isfinite(least):
        return None
    stages, first = list[PiperStage](), 0
    while first < layers:
        end, place, data = came[first, left, sharing].tolist()
        again = ranges[place].again(first, end, -(-sharing // data))
        tensor = problem.divisions[place].tensor
        stages.append(PiperStage(first, end, tensor, data, again))
        first, left, sharing = end, left - tensor * data, sharing - data
    return least, tuple(stages)


def _seconds(chain: Chain, first: int, end: int, data: int, count: int) -> float:
    """Seconds of a stage for a micro-batch of the step, with everything kept."""
    layers = len(chain.problem.layers)
    messages = sum(2 * chain.message(at) for at in (first, end) if 0 < at < layers)
    speed = chain.problem.link.bytes_per_second
    sums = 4 * (data - 1) * chain.total("weight", first, end) / (data * count * speed) if speed else 0.0
    return (chain.seconds(first, end) + messages) / data + sums


PLANNER = PlannerKind(
    name="piper",
    plan=plan,
    axes=(
        PARTS,
        REPLICAS,
        CUTS,
        AGAIN,
    ),
    chooses="cut, replicas and parts of each stage, recomputation by layer",
    by="dynamic program with a knapsack",
    lacks="filling the pipeline",
    position=40,
)
