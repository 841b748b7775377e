"""Seconds and bytes of stages for many candidates at once, from prefix sums over the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from runner.plan.planners.orders import PlayedOrder
from runner.plan.planners.values import Division, Kept, Lines, PlanningProblem
from runner.plan.values import Link
from runner.schedule.simulation.batched import BatchedCosts, Numbers

__all__ = ["Candidates", "Setting", "StageTable", "Whole", "state_bytes"]

Whole: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all candidates of one table share.

    Args:
        division: the layers, divided among so many ranks.
        samples: the samples of a micro-batch.
        microbatches: the micro-batches of a step and replica.
        data: replicas.
        zero: the stage of ZeRO of the replicas; None: DDP.
        in_host: whether optimizer states are in the host's memory.
    """

    division: Division
    samples: float
    microbatches: int
    data: int
    zero: int | None
    in_host: bool = False

    def update_seconds_per_byte(self, problem: PlanningProblem) -> float:
        """Seconds of a step's update for a byte of a stage's gradients."""
        updaters = self.data if self.zero else 1  # ranks that share it
        if self.in_host and problem.host_update is not None:
            return problem.host_update.seconds_per_byte(self.data) / updaters
        return problem.step_seconds_per_byte / updaters


@dataclass(frozen=True, slots=True)
class Candidates:
    """Cuts, each with what its stages keep.

    Args:
        cuts: the first layer of each stage and, as the last row, the number of layers; shape (stages + 1, K).
        kept: for each stage the place of its way to keep among those of the division, shape (stages, K).
    """

    cuts: Whole
    kept: Whole

    @property
    def count(self) -> int:
        """K."""
        return int(self.cuts.shape[1])

    def only(self, number: int) -> Candidates:
        """One of them."""
        return Candidates(self.cuts[:, number : number + 1], self.kept[:, number : number + 1])


class StageTable:
    """The seconds and bytes of every range of layers in one setting."""

    def __init__(self, problem: PlanningProblem, setting: Setting) -> None:
        self.problem, self.setting = problem, setting
        self.num_layers = len(problem.layers)
        division, samples = setting.division, setting.samples
        self.forward = _sums(_of_samples(division.forward, samples))
        self.backward = self._of_kept(lambda kept: _of_samples(kept.backward, samples))
        self._input_gradient = self._of_kept(lambda kept: _of_samples(kept.input_gradient, samples))
        self._weight_gradient = self._of_kept(lambda kept: _of_samples(kept.weight_gradient, samples))
        self._saved = self._of_kept(lambda kept: _of_samples(kept.saved, samples))
        self._left = self._of_kept(lambda kept: _of_samples(kept.left_to_w, samples))
        self._gradient = _sums(division.gradient)
        self._states = _sums(state_bytes(setting))
        self._update = setting.update_seconds_per_byte(problem)
        self._boundary = np.array([samples * each for each in division.boundary])

    def _of_kept(self, of: Callable[[Kept], Iterable[float]]) -> Numbers:
        return np.stack([_sums(of(kept)) for kept in self.setting.division.ways])

    def seconds(self, kept: int) -> Numbers:
        """Seconds of a forward and a backward of the layers up to each, with a way to keep."""
        found: Numbers = self.forward + self.backward[kept]
        return found

    def bytes_with(self, kept: int, whole: int, left: int) -> Numbers:
        """Bytes of the layers up to each, while so many micro-batches are there, and of so many more what W needs."""
        found: Numbers = self._states + whole * self._saved[kept] + left * self._left[kept]
        return found

    def working(self, kept: int) -> float:
        """The most bytes that one layer takes while it runs."""
        return max(_of_samples(self.setting.division.ways[kept].working, self.setting.samples))

    def costs(self, candidates: Candidates, order: PlayedOrder) -> BatchedCosts:
        """The durations of the candidates' stages."""
        cuts, kept = candidates.cuts, candidates.kept
        first, last = cuts[:-1], cuts[1:]

        def of(sums: Numbers) -> Numbers:
            found: Numbers = sums[kept, last] - sums[kept, first]
            return found

        links = self.problem.links.boundaries(order.rows, self.setting.data, self.setting.division.tensor)
        sent = self._boundary[cuts[1:-1] - 1]
        message = np.where(sent > 0, np.array([each.latency_seconds for each in links])[:, None], 0.0)
        message = message + sent * np.array([_seconds_per_byte(each) for each in links])[:, None]
        action = self.problem.overhead
        return BatchedCosts(
            self.forward[last] - self.forward[first] + action,
            of(self.backward) + action,
            of(self._input_gradient) + action,
            of(self._weight_gradient) + action,
            message,
        )

    def step_seconds(self, candidates: Candidates, order: PlayedOrder) -> Numbers:
        """Seconds of a step of each candidate, with the sums of gradients and the update of the slowest rank."""
        costs = self.costs(candidates, order)
        ends = order.play(costs, self.setting.microbatches)
        gradients = self._gradient[candidates.cuts[1:]] - self._gradient[candidates.cuts[:-1]]
        after = np.zeros_like(ends)
        places = [[rank for rank, own in enumerate(order.stages_of) if stage in own] for stage in range(order.stages)]
        for rank, stages in enumerate(order.stages_of):
            for stage in stages:
                after[rank] += self._sum_seconds(gradients[stage], places[stage])
                after[rank] += gradients[stage] * self._update
        total: Numbers = (ends + after).max(axis=0)
        cores = self.problem.cores
        if cores is not None:
            ranks = self.setting.data * self.setting.division.tensor
            busy = self.setting.microbatches * (costs.forward + costs.backward).sum(axis=0)
            total = np.maximum(total, ranks * busy / cores + after.max(axis=0))
        return total

    def _sum_seconds(self, gradients: Numbers, places: Sequence[int]) -> Numbers:
        ranks, setting = self.setting.data * len(places), self.setting
        link = self.problem.links.replicas(places, setting.data, setting.division.tensor)
        found: Numbers = 2 * (ranks - 1) * (link.latency_seconds + gradients / ranks * _seconds_per_byte(link))
        return found

    def peaks(self, candidates: Candidates, order: PlayedOrder) -> Numbers:
        """Bytes of each rank at its peak, shape (ranks, K): an estimate, a little too high as a rule."""
        first, last, kept = candidates.cuts[:-1], candidates.cuts[1:], candidates.kept
        saved = self._saved[kept, last] - self._saved[kept, first]
        left = self._left[kept, last] - self._left[kept, first]
        states = self._states[last] - self._states[first]
        entering = np.where(first > 0, self._boundary[np.maximum(first - 1, 0)], 0.0)
        working = np.array([self.working(each) for each in range(len(self.setting.division.ways))])[kept]
        found = np.zeros((order.ranks, candidates.count))
        for rank, (stages, moments) in enumerate(zip(order.stages_of, order.held, strict=True)):
            own = list(stages)
            most = np.zeros(candidates.count)
            for moment in moments:
                here = np.array(moment.whole) @ saved[own] + np.array(moment.left_to_w) @ left[own]
                inputs = np.array(moment.whole) + np.array(moment.left_to_w) + np.array(moment.inputs)
                most = np.maximum(most, here + inputs @ entering[own])
            found[rank] = states[own].sum(axis=0) + most + working[own].max(axis=0)
        return found


def state_bytes(setting: Setting) -> list[float]:
    """What each layer's weights, gradients and states take between backwards, by ZeRO's division."""
    zero, division = setting.zero or 0, setting.division
    shares = [setting.data if zero >= least else 1 for least in (3, 2, 1)]
    states = [0.0 for _ in division.state] if setting.in_host else division.state
    rows = zip(division.weight, division.gradient, states, strict=True)
    return [sum(size / share for size, share in zip(row, shares, strict=True)) for row in rows]


def _seconds_per_byte(link: Link) -> float:
    return 1 / link.bytes_per_second if link.bytes_per_second else 0.0


def _of_samples(lines: Lines, samples: float) -> list[float]:
    return [line.of(samples) for line in lines]


def _sums(values: Iterable[float]) -> Numbers:
    return np.array(list(accumulate(values, initial=0.0)))
