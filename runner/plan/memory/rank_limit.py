"""Bounds the memory of ranks with several stages for the search for a partition."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from runner.plan.cut.values import Partition
from runner.plan.memory.held import Held, held_by_ranks
from runner.plan.memory.stage_limit import StageMemoryLimit, bytes_of_one, running_bytes
from runner.schedule.values import Schedule

__all__ = ["RankMemory"]


class RankMemory:
    """Tells about how much memory each rank needs with all of its stages.

    It takes the moment when most is held and the stage that needs most while it runs, even if that is at another
    moment, so that it says a little more than the walk of the whole rank, which decides in the end.

    Args:
        stages: what single stages need.
        schedule: tells which stages a rank has, and which of their micro-batches it holds at once.
        limits: the limit of each rank, in bytes.
    """

    def __init__(self, stages: StageMemoryLimit, schedule: Schedule, limits: Sequence[int]) -> None:
        import numpy as np  # a plan of one stage per rank does without

        self._stages = stages
        self._held = [schedule.stages_of(rank) for rank in range(schedule.ranks)]
        # A row per moment of a rank: how often the bytes of one micro-batch of each stage are held. An order from list
        # scheduling has hundreds of moments, which a search weighs for every cut.
        self._moments = [np.array(moments).reshape(len(moments), -1) for moments in held_by_ranks(schedule)]
        self._limits = limits
        self._cached = cache(self._rank_peak)  # a moved boundary changes the layers of few ranks
        self._of_stage = cache(self._bytes_of)

    def highest(self, layers: Partition) -> int:
        """The peak of the rank that needs most, in bytes."""
        return max(self._peaks(layers))

    def excess(self, layers: Partition) -> int:
        """The bytes by which ranks exceed their limits, summed over ranks."""
        return sum(max(0, peak - limit) for peak, limit in zip(self._peaks(layers), self._limits, strict=True))

    def _peaks(self, layers: Partition) -> list[int]:
        return [self._cached(rank, *(layers[stage] for stage in held)) for rank, held in enumerate(self._held)]

    def _rank_peak(self, rank: int, *layers: tuple[int, int]) -> int:
        own = self._held[rank]
        stages = [self._of_stage(stage, *ends) for stage, ends in zip(own, layers, strict=True)]
        held = int((self._moments[rank] @ [size for each in stages for size in each.of_one]).max())
        running, step = max(each.running for each in stages), sum(each.step for each in stages)
        return self._stages.held_bytes[own[0]] + sum(each.states for each in stages) + max(held + running, step)

    def _bytes_of(self, stage: int, first: int, last: int) -> _StageBytes:
        figures = self._stages.figures(first, last)
        states = self._stages.state_bytes(figures, stage)
        step = self._stages.step_bytes(figures)
        return _StageBytes(bytes_of_one(figures), running_bytes(figures), step, states)


class _StageBytes(NamedTuple):
    """What a stage needs with some layers, in bytes."""

    of_one: Held  # of a micro-batch
    running: int
    step: int
    states: int
