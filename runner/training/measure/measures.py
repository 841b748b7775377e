"""Computes the figures of a record from the times of all ranks; pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from statistics import fmean, median
from typing import Any, Self

from runner.engine.measure.timeline import Event, StepTimes
from runner.plan.values import RunPlan

__all__ = [
    "steady_bubble_ratio",
    "RankMeasures",
    "bubble_ratio",
    "compute_seconds",
    "measured_bubble_ratio",
    "seconds_of_median_step",
    "timed_events",
]

_OF_STEPS = ("walls", "loads", "calls")


@dataclass(frozen=True)
class RankMeasures:
    """What one rank measured during a run.

    Args:
        steps: the times of each step.
        events: compute events of some steps, by step.
        replica: number of the rank's replica.
        peak_memory_bytes: the most memory that its tensors took.
        bytes_per_step: kind of message to the bytes that the rank sent in one step.
        state_bytes: weights, gradients and optimizer states between steps.
        reserved_bytes: the most memory that a device's allocator reserved; None on a CPU.
        process_bytes: the most memory that its process had.
        walls, loads, calls: seconds of each step in all, waiting for batches, and in callbacks and loggers.
    """

    steps: tuple[StepTimes, ...]
    events: Mapping[int, Sequence[Event]]
    replica: int
    peak_memory_bytes: int
    bytes_per_step: Mapping[str, float]
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: int | None = None
    process_bytes: int = 0
    walls: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    calls: tuple[float, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        """This as plain values, which can be sent to another rank."""
        steps = [astuple(times) for times in self.steps]
        events = {step: [tuple(event) for event in events] for step, events in self.events.items()}
        mappings = {"bytes_per_step": dict(self.bytes_per_step), "state_bytes": dict(self.state_bytes)}
        own: dict[str, Any] = {"replica": self.replica, "peak_memory_bytes": self.peak_memory_bytes}
        own |= {"reserved_bytes": self.reserved_bytes, "process_bytes": self.process_bytes}
        own |= {name: list(getattr(self, name)) for name in _OF_STEPS}
        return {"steps": steps, "events": events, **own, **mappings}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_plain`."""
        steps = tuple(StepTimes(*times) for times in plain["steps"])
        events = {step: [Event(*event) for event in events] for step, events in plain["events"].items()}
        made = {name: tuple(plain[name]) for name in _OF_STEPS}
        return cls(**{**plain, **made, "steps": steps, "events": events})


def bubble_ratio(ranks: Sequence[RankMeasures], timed: Sequence[int], interval: int = 1) -> float | None:
    """Idle / total rank time over the flushed span (first to last compute of a step); median over steps.

    Args:
        ranks: all ranks; each replica's pipeline has its own span.
        timed: indices of the steps to use.
        interval: number of steps after which the schedule repeats; that many consecutive steps are measured together.
    """
    ratios = []
    for replica in sorted({rank.replica for rank in ranks}):
        pipeline = [rank for rank in ranks if rank.replica == replica]
        for several in zip(*(timed[number:] for number in range(min(interval, len(timed)))), strict=False):
            steps = [[rank.steps[index] for rank in pipeline] for index in several]
            span = sum(max(s.last_compute for s in row) - min(s.first_compute for s in row) for row in steps)
            if span > 0:
                ratios.append(1.0 - sum(s.compute for row in steps for s in row) / (len(pipeline) * span))
    return median(ratios) if ratios else None


def steady_bubble_ratio(ranks: Sequence[RankMeasures], timed: Sequence[int]) -> float | None:
    """Idle / total rank time from one batch to the next where windows overlap; the median over steps.

    A rank's share of a step begins with its first compute after the batch was submitted and ends where the next one's
    begins. Ranks are skewed against each other, so that a step has no span of all ranks together.
    """
    ratios = []
    for index in timed:
        if all(index + 1 < len(rank.steps) for rank in ranks):
            pairs = [(rank.steps[index], rank.steps[index + 1]) for rank in ranks]
            total = sum(following.first_compute - step.first_compute for step, following in pairs)
            if total > 0:
                ratios.append(1.0 - sum(step.compute for step, _ in pairs) / total)
    return median(ratios) if ratios else None


def measured_bubble_ratio(plan: RunPlan, ranks: Sequence[RankMeasures], timed: Sequence[int]) -> float | None:
    """The bubble as the plan's schedule defines it; None if no step was timed."""
    if plan.schedule.is_asynchronous:
        return steady_bubble_ratio(ranks, timed)
    return bubble_ratio(ranks, timed, plan.schedule.windows)


def compute_seconds(ranks: Sequence[RankMeasures], timed: Sequence[int]) -> list[float]:
    """For every rank, its compute time in a median step; empty if no step was timed."""
    return [median(rank.steps[index].compute for index in timed) for rank in ranks] if timed else []


def seconds_of_median_step(
    ranks: Sequence[RankMeasures], timed: Sequence[int], walls: Mapping[int, float]
) -> dict[str, float] | None:
    """How the time of a median step was spent, as the mean over ranks of shares of their own time in this step.

    The parts add up to the step.

    The bubble is the time spent waiting for activations, gradients and the step's header, and at STEP for slower ranks.
    The rank that arrives last at STEP waits for nobody, so its time there is the cost of the exchange itself, which is
    communication, as is the time of starting messages and sums. Each part is measured, and what is left is the rest:
    the engine's own time between its actions, and Lightning's loop. What offloading moves is moved within compute
    actions and updates; compute and optimizer are without it.
    """
    if not timed:
        return None
    ordered = sorted(timed, key=lambda index: walls[index])
    index = ordered[len(ordered) // 2]
    exchange = min(rank.steps[index].waited_at_step for rank in ranks)
    shares = [_shares(rank, index, exchange, walls[index]) for rank in ranks]
    return {part: fmean(each[part] for each in shares) * walls[index] for part in shares[0]}


def _shares(rank: RankMeasures, index: int, exchange: float, wall: float) -> dict[str, float]:
    """What each part is of a rank's own time in a step.

    Args:
        exchange: seconds of the exchange at STEP.
        wall: seconds of the step, if the rank has not measured its own: ranks may be skewed against each other.
    """
    step, own = rank.steps[index], rank.walls[index] if rank.walls else wall
    parts = {
        "data": rank.loads[index] if rank.loads else 0.0,
        "compute": step.compute - step.moved_in_compute,
        "communication": step.messages + exchange,
        "bubble": step.waiting + step.waited_at_step - exchange,
        "optimizer": step.optimizer - step.moved_in_optimizer,
        "offload": step.moved,
        "callbacks": rank.calls[index] if rank.calls else 0.0,
    }
    return {part: seconds / own for part, seconds in (parts | {"rest": own - sum(parts.values())}).items()}


def timed_events(
    ranks: Sequence[RankMeasures], timed: Sequence[int], walls: Mapping[int, float]
) -> tuple[int, dict[int, Sequence[Event]]] | None:
    """The events of all ranks in the recorded step whose time is nearest to the median."""
    numbers = [index for index in timed if all(rank.steps[index].step in rank.events for rank in ranks)]
    if not numbers:
        return None
    middle = median(walls[index] for index in timed)
    index = min(numbers, key=lambda number: abs(walls[number] - middle))
    step = ranks[0].steps[index].step
    return step, {number: rank.events[step] for number, rank in enumerate(ranks)}
