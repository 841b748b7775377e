"""Moves boundaries between stages together with the choice of what each layer keeps.

What a stage may keep depends on its layers, and which layers it should have on the seconds that its choice leaves. Of a
few partitions all are planned. Of many, layers move over one boundary at a time: of all such moves the best is made,
also if the step gets longer for a while, and the best of all partitions on the way is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from math import comb

from runner.config.units import format_seconds
from runner.errors import RequestError
from runner.plan.choices import ProgramChoice
from runner.plan.cut.values import Partition
from runner.plan.draft.draft import Draft
from runner.plan.draft.stages import Stages, stages_of
from runner.plan.values import RunPlan

__all__ = ["ALL", "Assemble", "with_boundaries_moved"]

Assemble = Callable[[Stages], RunPlan]
"""A function that makes the plan of some stages of one draft."""

ALL = 40
"""The most partitions of which every one is planned; eight layers have 35 at most."""

_WORSE = 2  # moves in a row that may make nothing better


def with_boundaries_moved(draft: Draft, plan: RunPlan, assemble: Assemble, choose: ProgramChoice) -> RunPlan:
    """The plan with the stages whose step is shortest, of those that fit.

    Args:
        draft: the request, and what follows from it.
        plan: the plan to begin with, which is the first of equally good ones.
        assemble: makes the plan of some stages.
        choose: chooses the programs of the stages; what it has priced serves for all partitions.
    """
    search = _Search(draft, plan, assemble, choose)
    count, stages = len(draft.profile.layers), draft.schedule.stages
    if comb(count - 1, stages - 1) <= ALL:
        search.try_all(count, stages)
    else:
        search.move_layers()
    best, tried = search.best, len(search.plans)
    if best.partition == plan.partition:
        return plan
    before, after = format_seconds(plan.time.step_seconds), format_seconds(best.time.step_seconds)
    layers = ", ".join(str(last - first + 1) for first, last in best.partition)
    told = f"offload.activations={draft.config.offload.activations} moves boundaries: of {tried} cuts, stages of "
    told += f"{layers} layers take {after} a step, after {before}"
    return replace(best, reasons=(*best.reasons, told + ("" if plan.fits else ", which did not fit")))


class _Search:
    """The partitions that were planned; see :func:`with_boundaries_moved`.

    Attributes:
        plans: the plan of each partition; None where it cannot be trained.
    """

    def __init__(self, draft: Draft, plan: RunPlan, assemble: Assemble, choose: ProgramChoice) -> None:
        self._draft, self._assemble, self._choose = draft, assemble, choose
        self.plans: dict[Partition, RunPlan | None] = {plan.partition: plan}

    @property
    def best(self) -> RunPlan:
        """The best of the plans so far; the first of several."""
        return min((plan for plan in self.plans.values() if plan is not None), key=_rank)

    def try_all(self, count: int, stages: int) -> None:
        """Plan every partition."""
        for starts in combinations(range(1, count), stages - 1):
            self._plan(tuple(zip((0, *starts), (*(start - 1 for start in starts), count - 1), strict=True)))

    def move_layers(self) -> None:
        """Move a layer over the boundary where that is best, again and again."""
        now, without_gain = self.best, 0
        while without_gain <= _WORSE:
            near = [self._plan(layers) for layers in _near(now.partition) if layers not in self.plans]
            possible = [plan for plan in near if plan is not None]
            if not possible:
                return
            best, now = self.best, min(possible, key=_rank)
            without_gain = 0 if best is now else without_gain + 1

    def _plan(self, layers: Partition) -> RunPlan | None:
        if layers not in self.plans:
            try:
                stages = stages_of(self._draft, layers, choose=self._choose)
                self.plans[layers] = self._assemble(stages)
            except RequestError:
                self.plans[layers] = None
        return self.plans[layers]


def _rank(plan: RunPlan) -> tuple[bool, float]:
    """Plans that fit by their seconds, then the others by what they need."""
    return not plan.fits, plan.time.step_seconds if plan.fits else float(max(plan.memory.peak_bytes))


def _near(layers: Partition) -> Iterator[Partition]:
    """The partitions in which one layer is on the other side of a boundary."""
    for at in range(1, len(layers)):
        (first, last), (start, end) = layers[at - 1], layers[at]
        if last > first:
            yield (*layers[: at - 1], (first, last - 1), (start - 1, end), *layers[at + 1 :])
        if end > start:
            yield (*layers[: at - 1], (first, last + 1), (start + 1, end), *layers[at + 1 :])
