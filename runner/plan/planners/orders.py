"""The orders among which a planner chooses, each walked once for a number of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from runner.plan.planners.values import Order
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.kinds import ScheduleRequest
from runner.schedule.lowering.fuse import fuse_backwards
from runner.schedule.simulation.batched import (
    BatchedCosts,
    CompiledOrder,
    Held,
    Numbers,
    compiled,
    held_at_once,
)

__all__ = ["Orders", "PlayedOrder", "copies_in", "exists", "stages_together"]


@dataclass(frozen=True)
class PlayedOrder:
    """What a search must know of one order.

    Args:
        order: its name; None: one stage, whose micro-batches follow each other.
        ranks, stages: how many one replica has.
        stages_of: the stages of each rank.
        held: for each rank the moments at which it holds most.
        groups: stages that share ranks: what they keep is chosen together.
        copies: ranks of one replica that hold the same stage.
        compiled: the order itself; None without a pipeline.
        rows: for each pipeline of a replica, the rank of each stage.
    """

    order: Order | None
    ranks: int
    stages: int
    stages_of: tuple[tuple[int, ...], ...]
    held: tuple[tuple[Held, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    copies: int
    compiled: CompiledOrder | None
    rows: tuple[tuple[int, ...], ...] = ((0,),)

    @property
    def num_actions(self) -> int:
        """How many actions one play has."""
        return len(self.compiled.actions) if self.compiled is not None else 1

    def play(self, costs: BatchedCosts, microbatches: int) -> Numbers:
        """The end of each rank's last action, shape (ranks, K)."""
        if self.compiled is not None:
            return self.compiled.play(costs)
        whole: Numbers = microbatches * (costs.forward + costs.backward)
        return whole

    def pressure(self, group: tuple[int, ...]) -> int:
        """The most micro-batches that a rank holds of a group's stages."""
        most = 0
        for stages, moments in zip(self.stages_of, self.held, strict=True):
            if set(stages) & set(group):
                most = max(most, *(sum(moment.whole) for moment in moments))
        return most


class Orders:
    """Walks each order once; what was walked is kept."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], PlayedOrder | None] = {}

    def of(
        self,
        order: Order | None,
        ranks: int,
        microbatches: int,
        replicas: tuple[int, ...] = (),
        shares: tuple[int, ...] = (),
        placement: tuple[int, ...] = (),
        starts: tuple[float, ...] = (),
    ) -> PlayedOrder | None:
        """An order of so many ranks and micro-batches; None if it cannot be played for many candidates at once.

        Args:
            order, ranks, microbatches: the order.
            replicas: the ranks of each stage that take its micro-batches in turns; empty: one.
            shares: the share of each micro-batch in the samples; empty: all have as many.
            placement, starts: the rank of each stage, and the pattern of its actions; empty: as the order says.
        """
        key = order, ranks, microbatches, replicas, shares, placement, starts
        if key not in self._known:
            own = {"replicas": replicas, "shares": shares, "placement": placement, "starts": starts}
            given = {name: each for name, each in own.items() if each}
            self._known[key] = _alone() if order is None else _made(order, ranks, microbatches, given)
        return self._known[key]


def exists(order: Order, ranks: int, microbatches: int) -> bool:
    """Whether there is such an order."""
    return SPECS[order.schedule].accepts(_request(order, ranks, microbatches))


def _request(
    order: Order, ranks: int, microbatches: int, options: Mapping[str, tuple[float, ...]] | None = None
) -> ScheduleRequest:
    return ScheduleRequest(ranks, microbatches, order.chunks, options=options or {})


@cache
def copies_in(order: Order | None) -> int:
    """How many ranks of a pipeline hold a stage: two where micro-batches go in two directions."""
    if order is None:
        return 1
    request = ScheduleRequest(4, 8, order.chunks)
    spec = SPECS[order.schedule]
    return len(spec.generate(request).copies_of(0)) if spec.accepts(request) else 2


def _alone() -> PlayedOrder:
    return PlayedOrder(None, 1, 1, ((0,),), ((Held((1,), (0,), (0,)),),), ((0,),), 1, None)


def _made(order: Order, ranks: int, microbatches: int, options: Mapping[str, tuple[float, ...]]) -> PlayedOrder | None:
    request, spec = _request(order, ranks, microbatches, options), SPECS[order.schedule]
    if not spec.accepts(request):
        return None
    schedule = fuse_backwards(spec.generate(request))
    played = None if schedule.moves or schedule.parts > 1 else compiled(schedule)
    if played is None:
        return None
    stages_of = tuple(schedule.stages_of(rank) for rank in range(ranks))
    copies = max(len(schedule.copies_of(stage)) for stage in range(schedule.stages))
    return PlayedOrder(
        order,
        ranks,
        schedule.stages,
        stages_of,
        held_at_once(schedule),
        stages_together(stages_of, schedule.stages),
        copies,
        played,
        schedule.rows,
    )


def stages_together(stages_of: tuple[tuple[int, ...], ...], stages: int) -> tuple[tuple[int, ...], ...]:
    """Groups of stages such that no rank has stages of two groups, as small as possible, in the order of the stages."""
    group = np.arange(stages)
    for own in stages_of:
        members = group[list(own)]
        group[np.isin(group, members)] = members.min(initial=stages)
    found: dict[int, list[int]] = {}
    for stage, number in enumerate(group.tolist()):
        found.setdefault(number, []).append(stage)
    return tuple(tuple(each) for each in found.values())
