"""Divides the memory of a rank between its stages, for policies that choose under a budget."""

from __future__ import annotations

from collections.abc import Sequence

from runner.memory.solve.values import StageChoice
from runner.plan.choices import stage_peak
from runner.plan.memory.predict import in_flight_microbatches
from runner.plan.stages.figures import StageFigures
from runner.plan.values import MemoryPrediction
from runner.schedule.values import Schedule

__all__ = ["EqualShares", "SharesByLifetime"]

_SCALARS, _SCALARS_OF_MICROBATCH = 64, 16  # bytes

Budgets = tuple[int, ...]
"""For each stage, the bytes that its saved tensors and temporaries may take."""


class EqualShares:
    """Gives each stage of a rank an equal part of what the rank has left.

    A few bytes stay free for losses, weights and totals of micro-batches, which predictions of tensors do not count.

    Args:
        limits: the memory limit of each rank, in bytes.
        schedule: tells which stages a rank has.
        plain: the memory that ranks need if everything is kept.
        figures: the figures of each stage if everything is kept.
    """

    def __init__(
        self, limits: Sequence[int], schedule: Schedule, plain: MemoryPrediction, figures: Sequence[StageFigures]
    ) -> None:
        self._limits, self._schedule, self._plain, self._figures = limits, schedule, plain, figures

    def first(self) -> Budgets:
        """The budgets to begin with. If everything fits into a rank, each of its stages may keep everything.

        This is asked of the rank's whole memory, because what a stage needs by itself is a bound where backwards are in
        two parts: a micro-batch that waits for the second one counts as a whole.
        """
        found: dict[int, int] = {}
        in_flight = in_flight_microbatches(self._schedule)
        for rank, left in enumerate(self._left()):
            fits = self._plain.peak_bytes[rank] <= self._limits[rank]
            for stage, share in self._shares(self._schedule.stages_of(rank), left).items():
                if fits:
                    share = max(share, stage_peak(self._figures[stage], in_flight[stage]))
                found[stage] = min(share, found.get(stage, share))
        return tuple(found[stage] for stage in range(self._schedule.stages))

    def lowered(self, budgets: Budgets, found: MemoryPrediction, choices: Sequence[StageChoice]) -> Budgets | None:
        """The budgets less what ranks need above their limit; None if no rank does.

        Args:
            budgets: the budgets so far.
            found: the memory that ranks need with these budgets.
            choices: what was chosen for each stage under them.
        """
        over = [max(0, peak - limit) for peak, limit in zip(found.peak_bytes, self._limits, strict=True)]
        if not any(over):
            return None
        made = list(budgets)
        for rank, by in enumerate(over):
            for stage, budget in self._to_lower(self._schedule.stages_of(rank), budgets, choices).items():
                made[stage] = min(made[stage], max(0, budget - by))
        return tuple(made)

    def _left(self) -> list[int]:
        """For each rank, the bytes that are left for activations."""
        found = []
        for limit, parts, states in zip(self._limits, self._plain.parts, self._plain.states, strict=True):
            others = states.weights + states.gradients + states.optimizer + parts.buffers
            others += _SCALARS + _SCALARS_OF_MICROBATCH * self._schedule.microbatches
            found.append(max(0, limit - others))
        return found

    def _shares(self, stages: Sequence[int], left: int) -> dict[int, int]:
        return dict.fromkeys(stages, left // len(stages))

    def _to_lower(self, stages: Sequence[int], budgets: Budgets, choices: Sequence[StageChoice]) -> dict[int, int]:
        """What is lowered by what a rank needs above its limit: budgets of some of its stages."""
        return {stage: budgets[stage] for stage in stages}


class SharesByLifetime(EqualShares):
    """Gives the stages whose tensors live shortest what they need to keep everything, and the others the rest.

    A byte that a stage keeps takes memory once for each of its micro-batches in flight, and a move of it costs the same
    wherever it is. So moves of stages with many in flight free most for what they cost. By Little's law their number is
    the mean time from forward to backward, divided by the time between micro-batches.
    """

    def _shares(self, stages: Sequence[int], left: int) -> dict[int, int]:
        in_flight = in_flight_microbatches(self._schedule)
        kept = {stage: in_flight[stage] * self._figures[stage].saved_bytes for stage in stages}
        running = {stage: stage_peak(self._figures[stage], in_flight[stage]) - kept[stage] for stage in stages}
        left -= max(running.values())  # one stage runs at a time
        found = {}
        for stage in self._by_lifetime(stages):
            share = min(kept[stage], max(0, left))
            found[stage] = share + running[stage]
            left -= share
        return found

    def _to_lower(self, stages: Sequence[int], budgets: Budgets, choices: Sequence[StageChoice]) -> dict[int, int]:
        """What the stage takes that lives longest of those that can do with less."""
        for stage in reversed(self._by_lifetime(stages)):
            taken = choices[stage].chosen.peak_bytes
            if min(offer.peak_bytes for offer in choices[stage].offers) < taken:
                return {stage: min(taken, budgets[stage])}
        return {}

    def _by_lifetime(self, stages: Sequence[int]) -> list[int]:
        """The stages, shortest lifetime first."""
        in_flight = in_flight_microbatches(self._schedule)
        return sorted(stages, key=lambda stage: (in_flight[stage], -stage))
