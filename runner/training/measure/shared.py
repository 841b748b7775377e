"""Figures of all ranks while they train, which the ranks exchange without waiting for one another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from runner.engine.measure.timeline import StepTimes
from runner.plan.values import RunPlan
from runner.training.measure.measures import RankMeasures, measured_bubble_ratio

__all__ = ["SharedFigures", "store_of_ranks"]

_STEPS = 8  # the latest steps that a rank tells of
_SECONDS = 0.5  # between two tellings, at least


def store_of_ranks() -> Store | None:
    """The key-value store in which the ranks have met; None for a single rank."""
    from torch.distributed import distributed_c10d, is_initialized

    return distributed_c10d._get_default_store() if is_initialized() else None


class SharedFigures:
    """Every rank writes its latest times and its peak memory into the ranks' store; rank 0 reads what is there.

    Nothing waits: a rank that is slow is read later. So that all tell of the same steps, each one tells after multiples
    of a power of 2 of steps, which grows until the time between two tellings is long enough.

    Args:
        plan: the run's plan.
        rank: the rank of this process.
        store: see :func:`store_of_ranks`.

    Attributes:
        bubble: bubble of all ranks over the latest steps that all have told of, as the record measures it over the run;
            on rank 0 of a run with several stages, else None.
        peak_bytes: peak memory of the fullest rank on rank 0, on others their own.
    """

    def __init__(self, plan: RunPlan, rank: int, store: Store | None) -> None:
        self.bubble: float | None = None
        self.peak_bytes = 0
        self._plan = plan
        self._rank = rank
        self._replica = plan.topology.coordinates(rank).data  # the strategy does not know its rank yet
        self._store = store
        self._stride = 1

    def update(self, steps: Sequence[StepTimes], peak_bytes: int) -> None:
        """Tell the other ranks, and read what they have told before, if it is time for it.

        Args:
            steps: the times of this rank's steps.
            peak_bytes: its peak memory.
        """
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if self._store is None or not steps or (steps[-1].step + 1) % self._stride:
            return
        with contextlib.suppress(RuntimeError):  # the rank that holds the store has failed, and says why itself
            if self._rank == 0:
                self._read(self._store, steps)
            else:
                self._store.set(_key(self._rank), _told(self._replica, steps, peak_bytes))
        if len(steps) > 1 and (steps[-1].end - steps[-2].end) * self._stride < _SECONDS:
            self._stride *= 2

    def _read(self, store: Store, own: Sequence[StepTimes]) -> None:
        ranks = range(1, self._plan.layout["world_size"])
        if not store.check([_key(rank) for rank in ranks]):
            return
        others = [_heard(store.get(_key(rank))) for rank in ranks]
        self.peak_bytes = max(self.peak_bytes, *(rank.peak_memory_bytes for rank in others))
        if not self._plan.has_bubble:
            return
        measures = _of_common_steps([_measures(self._replica, own[-4 * self._stride - _STEPS :], 0), *others])
        bubble = measured_bubble_ratio(self._plan, measures, range(len(measures[0].steps)))
        self.bubble = bubble if bubble is not None else self.bubble


def _key(rank: int) -> str:
    return f"figures/{rank}"


def _told(replica: int, steps: Sequence[StepTimes], peak_bytes: int) -> str:
    times = [(one.step, one.first_compute, one.last_compute, one.compute) for one in steps[-_STEPS:]]
    return json.dumps([replica, peak_bytes, times])


def _heard(text: str | bytes) -> RankMeasures:
    replica, peak_bytes, times = json.loads(text)
    steps = [StepTimes(step, first_compute=a, last_compute=b, compute=c) for step, a, b, c in times]
    return _measures(replica, steps, peak_bytes)


def _measures(replica: int, steps: Sequence[StepTimes], peak_bytes: int) -> RankMeasures:
    return RankMeasures(tuple(steps), {}, replica, peak_bytes, {})


def _of_common_steps(ranks: Sequence[RankMeasures]) -> list[RankMeasures]:
    """The measures with the steps alone that all ranks have told of, in their order."""
    common = set.intersection(*({one.step for one in rank.steps} for rank in ranks))
    kept = [[one for one in rank.steps if one.step in common] for rank in ranks]
    return [_measures(rank.replica, steps, rank.peak_memory_bytes) for rank, steps in zip(ranks, kept, strict=True)]
