"""The search of ``schedule=auto``: the shortest of the published orders and of orders from list scheduling.

A published order is made for equal stages. Where stages differ, messages take time or memory is short, an order found
from the durations themselves is shorter; where none is, the published one is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from runner.schedule.generators.list_orders import num_rules, shortest_order
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.bounds import lower_bound
from runner.schedule.simulation.clock import StageCosts, peak_activations, simulate
from runner.schedule.values import Op, Schedule

__all__ = ["FOUND", "Choice", "CostsOf", "Bound", "Rate", "Rated", "search"]

CostsOf = Callable[[tuple[int, ...]], StageCosts]
"""A function from the first pipeline's placement (stage -> rank) to the durations of its stages."""

Rate = Callable[[Schedule], "tuple[float, bool] | None"]
"""A function that rates a schedule: seconds of its step and whether it fits; None: it cannot run at all."""

Bound = Callable[[Schedule], "float | None"]
"""A function that bounds the seconds of a schedule's step from below; None: nothing is known of it."""

FOUND = "auto"
"""The name of an order from list scheduling."""


def _unknown(schedule: Schedule) -> None:
    return None


_CHUNKS = (1, 2, 3, 4)
_NOT_TRIED = ("concatenation", "halving")
"""Variants: the first is the default; the other trains on halves of the requested micro-batches."""
_WORK = 1_500_000  # actions in all orders from list scheduling: about a minute
_CLOSE = 1.005  # relative distance to the lower bound that is good enough: durations vary by more


@dataclass(frozen=True)
class Rated:
    """A schedule, the seconds of its step, and whether it fits into the memory."""

    schedule: Schedule
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The result of a search.

    Args:
        best: the shortest order that fits; if none fits, the one that keeps fewest activations.
        named: the published orders that can run and were rated, the shortest first.
        is_cut: whether orders from list scheduling were left out, because they would have been too much work.
        over_bound: time of the best order's compute and messages, divided by the lowest bound of all placements.
    """

    best: Rated
    named: tuple[Rated, ...]
    over_bound: float
    is_cut: bool = False

    @property
    def beaten(self) -> Rated | None:
        """The shortest published order that fits, apart from the best."""
        return next((each for each in self.named if each.fits and each != self.best), None)

    @property
    def too_large(self) -> Rated | None:
        """The shortest published order that would be shorter than the best, but does not fit."""
        return next((each for each in self.named if not each.fits and each.seconds < self.best.seconds), None)


def search(
    request: ScheduleRequest, specs: Sequence[ScheduleSpec], costs_of: CostsOf, rate: Rate, bound: Bound = _unknown
) -> Choice:
    """Choose an order.

    Args:
        request: ranks and micro-batches; chunks, if they are fixed; the memory limit, which the bound uses.
        specs: the published schedules to try.
        costs_of: returns durations by placement; called for placements of schedules that were rated.
        rate: rates a schedule.
        bound: bounds what ``rate`` would find, from what it has found so far; a published order is not rated whose
            bound is longer than the two shortest that fit.

    Raises:
        ValueError: no schedule at all can run.
    """
    named = _rated(_published(request, specs), rate, bound)
    if not named:
        raise ValueError(f"no schedule of {request.ranks} ranks can run")
    named.sort(key=lambda each: each.seconds)
    split = any(_is_split(each.schedule) for each in named)
    bounds = _bounds(request, costs_of, [each.schedule for each in named])
    best, work = _best(named), _Work(_WORK)
    for placed, shortest in bounds:
        if best.fits and _span(best.schedule, costs_of) <= _CLOSE * shortest:
            break  # the placements that follow have larger bounds
        least = best.seconds if best.fits else float("inf")
        found = _list_scheduled(request, placed, costs_of(placed.placement[0]), rate, work, split=split, below=least)
        if found is not None and found.fits:
            best = _best([best, found])
    return Choice(best, tuple(named), _span(best.schedule, costs_of) / bounds[0][1], work.is_cut)


def _rated(schedules: Iterable[Schedule], rate: Rate, bound: Bound) -> list[Rated]:
    """Published orders, each rated unless two that fit are shorter than it can be.

    One with divided backwards is rated in any case: it tells whether the stages' backwards can be divided.
    """
    rated: list[Rated] = []

    def add(schedule: Schedule) -> None:
        worth = rate(schedule)
        if worth is not None:
            rated.append(Rated(schedule, *worth))

    bounded: list[Schedule] = []
    for schedule in schedules:
        if bound(schedule) is None:
            add(schedule)
        else:
            bounded.append(schedule)
    bounds = [bound(schedule) or 0.0 for schedule in bounded]
    for least, schedule in sorted(zip(bounds, bounded, strict=True), key=lambda each: each[0]):
        fitting = sorted(each.seconds for each in rated if each.fits)
        is_longer = len(fitting) > 1 and least > fitting[1]
        if not is_longer or (_is_split(schedule) and not any(_is_split(each.schedule) for each in rated)):
            add(schedule)
    return rated


def _span(schedule: Schedule, costs_of: CostsOf) -> float:
    return simulate(schedule, costs_of(schedule.placement[0])).makespan


def _bounds(request: ScheduleRequest, costs_of: CostsOf, schedules: Iterable[Schedule]) -> list[tuple[Schedule, float]]:
    """One schedule of each placement with the lower bound of its time; the lowest bound first."""
    placed = {(each.placement, each.pipeline_of_microbatch): each for each in schedules}
    bounds = []
    for schedule in placed.values():
        costs, limit = costs_of(schedule.placement[0]), request.option("memory_limit")
        ways = (lower_bound(schedule, costs, limit, recompute=recompute) for recompute in (False, True))
        bounds.append((schedule, min(ways)))
    return sorted(bounds, key=lambda item: (item[1], item[0].placement))


def _best(rated: Sequence[Rated]) -> Rated:
    """The shortest order that fits; if none fits, the one that keeps fewest activations."""

    def kept(each: Rated) -> float:
        return max(peak_activations(each.schedule))

    fitting = [each for each in rated if each.fits]
    return min(fitting, key=lambda each: (each.seconds, kept(each))) if fitting else min(rated, key=kept)


def _published(request: ScheduleRequest, specs: Sequence[ScheduleSpec]) -> Iterator[Schedule]:
    """Published orders with all numbers of chunks and pipelines, and all variants that keep the micro-batch size."""
    for spec in specs:
        numbers = dict.fromkeys((spec.default_chunks, *_CHUNKS)) if request.chunks is None else [request.chunks]
        variants = [None, *(name for name in spec.variants if name not in _NOT_TRIED)]
        pipes = [None, *range(4, request.ranks + 1, 2)] if "pipes" in spec.keys else [None]
        for chunks, variant, pipe in product(numbers, variants, pipes):
            own = {"variant": variant, "pipes": pipe}
            options = {key: value for key, value in own.items() if value is not None}
            asked = replace(request, chunks=chunks, options=options)
            if request.ranks == 1 and request.chunks is None and (chunks or 1) > 1:
                continue  # more stages on one rank only make weights come and go in another order
            if spec.accepts(asked):
                yield spec.generate(asked)


def _is_split(schedule: Schedule) -> bool:
    return any(action.op is Op.W for row in schedule.actions for action in row)


class _Work:
    """The work that is left for a search; what is too much for it is not begun."""

    def __init__(self, left: int) -> None:
        self.is_cut = False
        self._left = left

    def take(self, cost: int) -> bool:
        if cost > self._left:
            self.is_cut = True
            return False
        self._left -= cost
        return True


def _list_scheduled(
    request: ScheduleRequest,
    placed: Schedule,
    costs: StageCosts,
    rate: Rate,
    work: _Work,
    *,
    split: bool,
    below: float,
) -> Rated | None:
    """The shortest order under the largest limit under which one fits; None if there is none.

    Orders whose computes alone take ``below`` seconds are not rated, nor are smaller limits looked at then: with fewer
    micro-batches under way nothing gets shorter.
    """
    actions = placed.microbatches * placed.stages * (3 if split else 2)
    for limit in _limits(request):
        if not work.take(actions * num_rules(split=split)):
            return None
        found = shortest_order(FOUND, placed, costs, limit, below, split=split)
        if found is None:
            continue
        _, order = found
        if order is None:
            return None
        worth = rate(order)
        if worth is None:
            return None
        if worth[1]:
            return Rated(order, *worth)
    return None


def _limits(request: ScheduleRequest) -> list[int]:
    """Limits to try for the micro-batches that a rank may keep, from all to one."""
    ranks, most = request.ranks, min(request.microbatches, 2 * request.ranks)
    if (limit := request.option("memory_limit")) is not None:
        most = min(most, limit)
    tried = (2 * ranks, 3 * ranks // 2, ranks, 3 * ranks // 4, ranks // 2, ranks // 4, 1)
    return sorted({most, *(limit for limit in tried if 1 <= limit < most)}, reverse=True)
