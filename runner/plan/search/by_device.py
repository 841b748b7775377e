"""The plan of a pipeline whose devices are unlike: their order and the cut are chosen together, by play.

A least slowest stage does not tell orders apart, because it does not see how the pipeline fills and drains. So each
order of the devices is played with all cuts at once; where these are too many, with the cut whose slowest stage is the
fastest, and then with the neighbours of the best one until none is better. The fastest that may fit are planned as a
whole, and these plans decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb, inf
from typing import NamedTuple

import numpy as np

from runner.config.units import format_seconds
from runner.errors import RequestError
from runner.plan.choices import ProgramChoice
from runner.plan.cut.balance import moved
from runner.plan.cut.chosen import FIXED
from runner.plan.cut.partition import min_max, partition
from runner.plan.cut.values import Partition
from runner.plan.devices import DeviceClass, orders_of, told
from runner.plan.draft.draft import Draft
from runner.plan.draft.stages import Stages, choice_of, rough_profile, stage_memory, stages_of
from runner.plan.memory.rank_limit import RankMemory
from runner.plan.stages.figures import LayerRanges
from runner.plan.values import RunPlan
from runner.profile import ModelProfile
from runner.schedule.simulation.batched import BatchedCosts, CompiledOrder, Numbers, compiled
from runner.schedule.values import Schedule

__all__ = ["best_of_devices"]

_ALL = 20_000  # cuts of which every one is played
_AS_FAST = 1.02  # played seconds, by the shortest that fit, up to which others are planned
_PLANNED = 8  # plans that fit of which the shortest is taken
_TRIED = 64  # plans at most
_OVER = 1.05  # a rank's bound of its memory, by its limit, with which the exact walk may still fit

Assemble = Callable[[Draft, Stages], RunPlan]
"""A function that makes the plan of some stages of a draft."""


class _Candidate(NamedTuple):
    """An order of devices and a cut, with the seconds of its play."""

    seconds: float
    order: int
    layers: Partition


def best_of_devices(draft: Draft, assemble: Assemble) -> RunPlan:
    """The plan with the order of devices, and the cut, whose step is shortest among those that fit.

    If none fits, it is the one that lacks least by a bound.

    Args:
        draft: a request whose devices are unlike, and what follows from it.
        assemble: makes the plan of some stages.

    Raises:
        RequestError: no cut can be trained; the reasons are those of the fastest one.
    """
    orders, profile = [replace(draft, devices=each) for each in orders_of(draft.config)], rough_profile(draft)
    played = _Played(draft, profile)
    candidates = sorted(
        _Candidate(seconds, number, layers)
        for number, ordered in enumerate(orders)
        for seconds, layers in _candidates(ordered, played)
    )
    memory = [RankMemory(stage_memory(each, profile), each.schedule, each.limits) for each in orders]
    search = _Plans(orders, assemble, choice_of(draft))
    for each in candidates:
        if search.is_enough(each.seconds):
            break
        over = memory[each.order].excess(each.layers)
        if over <= (_OVER - 1) * min(orders[each.order].limits):
            search.plan(each)
    if not search.fitting:
        least = min(candidates, key=lambda each: memory[each.order].excess(each.layers))
        return search.nearest(least)
    return _told(search.shortest(), len(candidates), len(orders), candidates[-1].seconds / candidates[0].seconds)


class _Plans:
    """The plans that were made; see :func:`best_of_devices`."""

    def __init__(self, orders: Sequence[Draft], assemble: Assemble, choose: ProgramChoice) -> None:
        self._orders, self._assemble, self._choose = orders, assemble, choose
        self._tried = 0
        self._shortest_play = inf
        self._refusals: list[RequestError] = []
        self.fitting: list[RunPlan] = []

    def is_enough(self, seconds: float) -> bool:
        """Whether candidates that play so long, and longer ones, need no plan."""
        enough = len(self.fitting) == _PLANNED or self._tried == _TRIED
        return enough or seconds > _AS_FAST * self._shortest_play

    def plan(self, candidate: _Candidate) -> RunPlan | None:
        """The plan of a candidate; None if it cannot be trained."""
        self._tried += 1
        draft = self._orders[candidate.order]
        try:
            plan = self._assemble(draft, stages_of(draft, candidate.layers, choose=self._choose))
        except RequestError as refusal:
            self._refusals.append(refusal)
            return None
        if plan.fits:
            self.fitting.append(plan)
            self._shortest_play = min(self._shortest_play, candidate.seconds)
        return plan

    def shortest(self) -> RunPlan:
        """The plan with the shortest step; the first of several."""
        return min(self.fitting, key=lambda plan: plan.time.step_seconds)

    def nearest(self, candidate: _Candidate) -> RunPlan:
        """The plan of a candidate that need not fit."""
        plan = self.plan(candidate)
        if plan is None:
            raise self._refusals[0]
        return plan


def _told(plan: RunPlan, candidates: int, orders: int, slower: float) -> RunPlan:
    """The plan with the reason why it is the best."""
    names = ", ".join(each.name for each in plan.devices)
    layers = ", ".join(str(last - first + 1) for first, last in plan.partition)
    line = f"devices {names} ({told(plan.devices)}) with stages of {layers} layers"
    if candidates > 1:
        line += f" are the fastest that fit, of {candidates} that were played, in {orders} order{'s' * (orders > 1)} "
        line += f"of devices: {format_seconds(plan.time.step_seconds)} a step, and up to {slower:.2f} times as long"
    return replace(plan, reasons=(*plan.reasons, line))


def _candidates(draft: Draft, played: _Played) -> Iterator[tuple[float, Partition]]:
    """Cuts of one order of devices, with the seconds of their play."""
    count, stages, partitioned = len(draft.profile.layers), draft.schedule.stages, draft.config.partition
    if partitioned.name in FIXED:
        cuts = [partition(partitioned.name, draft.profile, stages, boundaries=partitioned.boundaries)]
        yield from zip(played.seconds(cuts, draft.devices), cuts, strict=True)
    elif comb(count - 1, stages - 1) <= _ALL:
        starts = combinations(range(1, count), stages - 1)
        cuts = [tuple(zip((0, *each), (*(at - 1 for at in each), count - 1), strict=True)) for each in starts]
        yield from zip(played.seconds(cuts, draft.devices), cuts, strict=True)
    else:
        yield from _improved(draft, played)


def _improved(draft: Draft, played: _Played) -> Iterator[tuple[float, Partition]]:
    """The cut whose slowest stage is the fastest and fits, and then better and better neighbours."""
    stages, rows = range(draft.schedule.stages), draft.schedule.placement[0]
    speeds = [draft.devices[rows[stage]].speed for stage in stages]
    starts = [
        min_max(played.layer_seconds, len(stages), limit=limit, replicas=speeds)
        for limit in (None, stage_memory(draft, played.profile))
    ]
    for start in dict.fromkeys(each for each in starts if each is not None):
        (seconds,), layers = played.seconds([start], draft.devices), start
        while True:
            yield seconds, layers
            near = list(moved(layers))
            best = min(zip(played.seconds(near, draft.devices), near, strict=True), default=(inf, layers))
            if best[0] >= seconds:
                break
            seconds, layers = best


class _Played:
    """Plays the schedule of a draft with many cuts at once.

    Args:
        draft: the request, and what follows from it; the order of its devices is not read.
        profile: the profile with what the activation policies keep, roughly.
    """

    def __init__(self, draft: Draft, profile: ModelProfile) -> None:
        order = compiled(draft.schedule)
        assert order is not None  # rules refuse the other schedules
        self.profile = profile
        self._order: CompiledOrder = order
        self._schedule: Schedule = draft.schedule
        count, ratio = len(profile.layers), draft.mean_samples / profile.samples
        ranges = LayerRanges(profile)
        shape = (4, count, count)
        self._seconds: Numbers = np.zeros(shape)
        for first in range(count):
            for last in range(first, count):
                each = ranges.figures(first, last)
                own = each.forward_seconds, each.backward_seconds, each.input_gradient_seconds
                self._seconds[:, first, last] = np.array([*own, each.weight_gradient_seconds]) * ratio
        layout = draft.layout
        links = draft.network.boundaries(draft.schedule.rows, layout.data, layout.tensor)
        sent = [ranges.figures(at, at).output_bytes * ratio for at in range(count)]
        self._messages: Numbers = np.array([[link.seconds(size) for size in sent] for link in links]).reshape(-1, count)

    @property
    def layer_seconds(self) -> list[float]:
        """The seconds of each layer's forward and backward; the last one's include the loss."""
        whole: Numbers = self._seconds[0] + self._seconds[1]
        return np.diagonal(whole).tolist()  # type: ignore[no-any-return]

    def seconds(self, cuts: Sequence[Partition], devices: Sequence[DeviceClass]) -> list[float]:
        """The length of the played schedule with each cut, on devices in this order."""
        if not cuts:
            return []
        bounds = np.array(cuts)
        first, last = bounds[:, :, 0].T, bounds[:, :, 1].T
        speeds = np.array([devices[rank].speed for rank in self._schedule.placement[0]])[:, None]
        forward, backward, inputs, weights = (each[first, last] / speeds for each in self._seconds)
        message = self._messages[np.arange(len(first) - 1)[:, None], last[:-1]]
        costs = BatchedCosts(forward, backward, inputs, weights, message)
        makespan: list[float] = self._order.makespan(costs).tolist()
        return makespan
