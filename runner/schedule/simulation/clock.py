"""An event simulator: it finds when each action starts and ends if each takes the time that its costs say.

Ranks run their lists in order, on the resources of :mod:`runner.schedule.simulation.resources`. Of a program everything
is played: messages, reductions, optimizer steps and what ranks lend each other. Of a schedule the compute is played;
messages between ranks take their time there without occupying anything, and moves take none.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runner.schedule.fills import Filling, FillKind
from runner.schedule.simulation.peaks import peaks_in_order, peaks_in_time
from runner.schedule.simulation.resources import Chance, Resources
from runner.schedule.values import COMPUTE, MOVES, Action, Op, Program, Schedule
from runner.schedule.walk import Walk, walk

__all__ = ["Costs", "Jitter", "Simulation", "StageCosts", "durations", "peak_activations", "play", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Durations of one rank's whole share of a micro-batch, in any one unit. A chunk costs its part of them.

    Args:
        F, B, I, W: forward, full backward, gradient of the input, gradient of the weights.
        comm: one message between ranks.
        fills: of work that fills bubbles, by the key of ``cost.*`` that its kind names; others cost what the kind says.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741 - the field's name in the literature
    W: float = 1.0
    comm: float = 0.0
    fills: Mapping[str, float] = field(default_factory=dict)

    def of_fill(self, kind: FillKind) -> float:
        """The duration of a kind of work that fills bubbles."""
        return self.fills.get(kind.cost, kind.default_cost)

    def per_stage(self, stages: int, chunks: int, parts: int = 1, filling: Filling | None = None) -> StageCosts:
        """The same durations stage by stage.

        Args:
            stages: how many there are.
            chunks: how many of them a rank has.
            parts: into how many parts a micro-batch is cut; the result is of one part.
            filling: what fills the bubbles; None: nothing does.
        """

        def each(cost: float) -> tuple[float, ...]:
            return (cost / (chunks * parts),) * stages

        return StageCosts(
            each(self.F),
            each(self.B),
            each(self.I),
            each(self.W),
            comm=(self.comm,) * (stages - 1),
            fills={
                kind.name: each(self.of_fill(kind)) if kind.of_microbatch else (self.of_fill(kind) / chunks,) * stages
                for kind in (filling.kinds if filling is not None else ())
            },
        )


@dataclass(frozen=True)
class StageCosts:
    """Durations of each stage for one micro-batch, in any one unit.

    Args:
        F, B, I, W: per stage; ``I`` and ``W`` may be empty where no backward is split.
        comm: per edge between stage s and s+1, either direction; empty means none.
        reduce, step: per stage and optimizer step; empty means none.
        fills: of work that fills bubbles, per stage, by the name of its kind; of a kind of a stage once, whatever the
            micro-batches. A kind that is not there costs nothing.
        stash: per stage: sending what it keeps of a micro-batch to another rank; empty means none.
        occupancy: per edge: the part of ``comm`` in which a message occupies its link; empty means none, so that no
            message waits for another.
    """

    F: Sequence[float]
    B: Sequence[float]
    I: Sequence[float] = ()  # noqa: E741 - the field's name in the literature
    W: Sequence[float] = ()
    comm: Sequence[float] = ()
    reduce: Sequence[float] = ()
    step: Sequence[float] = ()
    fills: Mapping[str, Sequence[float]] = field(default_factory=dict)
    stash: Sequence[float] = ()
    occupancy: Sequence[float] = ()


@dataclass(frozen=True)
class Jitter:
    """Chance: everything takes its cost times (1 + ``amount`` times an exponentially distributed number of mean 1).

    Every action, and every message, has a number of its own, which depends on nothing but it and the seed, so that
    two orders of the same work meet the same chance.
    """

    amount: float
    seed: int = 0

    def factor(self, action: Action, *, message: bool = False) -> float:
        """The factor of an action, or of the message that carries what the action made."""
        kind = "message" if message else "work"
        return 1.0 + self.amount * random.Random(f"{self.seed} {kind} {action}").expovariate(1.0)


@dataclass(frozen=True)
class Simulation:
    """When everything happens, in the unit of the costs.

    Args:
        view: what was played.
        start, end: per pipeline rank and index of its list.
        makespan: end of the last action.
        busy: per rank, time under compute and STEP.
        computing: per rank, time of that under compute.
        filling: per rank, time of that under work that fills bubbles.
        bubble_ratio: idle / total rank time over the makespan.
        inner_idle: per rank, time without compute between its first and its last compute action.
    """

    view: Schedule | Program = field(repr=False)
    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    computing: tuple[float, ...]
    bubble_ratio: float
    inner_idle: tuple[float, ...]
    filling: tuple[float, ...] = ()

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, most micro-batches of its whole share held at once, each from the start of its F to the end of its
        B or W.

        Of a recomputed one the input alone stays between F and R, which counts as nothing here. What a rank keeps for
        another counts.
        """
        schedule = self.view.schedule if isinstance(self.view, Program) else self.view
        return peaks_in_time(self.view, self.start, self.end) if schedule.moves else peaks_in_order(self.view)

    def last(self, ops: Collection[Op]) -> float:
        """The moment when the last action of these ops ends; 0 where there is none."""
        rows = zip(self.view.actions, self.end, strict=True)
        return max(
            (end for row, ends in rows for each, end in zip(row, ends, strict=True) if each.op in ops), default=0.0
        )

    @property
    def utilisation_without_fills(self) -> float:
        """The share of all rank time in which ranks run forwards, backwards and STEP."""
        total = self.makespan * len(self.busy)
        return (sum(self.busy) - sum(self.filling)) / total if total else 0.0


def simulate(view: Schedule | Program, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Simulation:
    """Play a schedule or a program. The time that this takes is linear in the number of actions.

    Args:
        view: what to play, in the order of its lists. Where ranks may leave that order, see
            :func:`runner.schedule.simulation.opportunistic.realised`.
        costs: the durations.
        jitter: what the durations are multiplied by; None means that they are exact.

    Raises:
        ValueError: if ``view`` cannot run to its end, or ``costs`` does not cover its stages.
    """
    return play(view, walk(view), costs, jitter)


def play(view: Schedule | Program, walked: Walk, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Simulation:
    """:func:`simulate` for a caller that has walked ``view`` already."""
    schedule = view.schedule if isinstance(view, Program) else view
    if walked.stuck:
        rank, index, action, missing = walked.stuck[0]
        raise ValueError(f"{schedule.name} hangs: rank {rank} waits at action {index} ({action}) for {missing}")
    if isinstance(costs, Costs):
        costs = costs.per_stage(schedule.stages, schedule.chunks, schedule.parts, schedule.filling)
    stash = _complete("a stash", costs.stash, schedule.stages)
    occupancy = _complete("a link's occupancy", costs.occupancy, schedule.stages - 1)
    resources = Resources(view, durations(costs, view), stash, occupancy, _chances(jitter))
    resources.play(walked.steps)
    return _summary(view, resources.start, resources.end)


def peak_activations(view: Schedule | Program) -> tuple[float, ...]:
    """Per rank, most micro-batches of its whole share held at once, as in :class:`Simulation`."""
    schedule = view.schedule if isinstance(view, Program) else view
    if schedule.moves:  # how many a rank keeps of others' depends on when these move them
        return simulate(view, Costs()).peak_activations
    return peaks_in_order(view)


def _complete(name: str, costs: Sequence[float], needed: int) -> Sequence[float]:
    """The costs, or as many zeros as are needed where no costs are given."""
    if costs and len(costs) != needed:
        raise ValueError(f"costs of {name}: {len(costs)} given, {needed} needed")
    return costs or (0.0,) * needed


def _chances(jitter: Jitter | None) -> Chance:
    if jitter is None:
        return lambda action, message: 1.0
    return lambda action, message: jitter.factor(action, message=message)


def durations(costs: StageCosts, view: Schedule | Program) -> dict[str, tuple[float, ...]]:
    """The duration of every op, and kind of fill, that ``view`` uses, by stage; that of a message by edge.

    Raises:
        ValueError: if ``costs`` does not cover the stages.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    none = (0.0,) * schedule.stages
    table: dict[str, tuple[float, ...]] = {
        Op.F: tuple(costs.F),
        Op.B: tuple(costs.B),
        Op.I: tuple(costs.I),
        Op.W: tuple(costs.W),
        Op.R: tuple(costs.F),
        Op.SEND: tuple(costs.comm) or none[:-1],
        **_fill_durations(costs, schedule),
        Op.REDUCE: tuple(costs.reduce) or none,
        Op.STEP: tuple(costs.step) or none,
    }
    used: set[str] = {action.work for row in view.actions for action in row} - {Op.RECV} - MOVES | {Op.SEND}
    for work in sorted(used):
        needed, given = schedule.stages - 1 if work == Op.SEND else schedule.stages, len(table[work])
        if given != needed:
            raise ValueError(f"costs of {work}: {given} given, {needed} needed for {schedule.stages} stages")
    return table


def _fill_durations(costs: StageCosts, schedule: Schedule) -> dict[str, tuple[float, ...]]:
    kinds = schedule.filling.kinds if schedule.filling is not None else ()
    free = {kind.name: (0.0,) * schedule.stages for kind in kinds}
    return free | {kind: tuple(cost) for kind, cost in costs.fills.items()}


def _summary(view: Schedule | Program, start: list[list[float]], end: list[list[float]]) -> Simulation:
    busy, computing, inner_idle, filling = [], [], [], []
    for row, starts, ends in zip(view.actions, start, end, strict=True):
        spans = [(a.op, s, e) for a, s, e in zip(row, starts, ends, strict=True) if a.op in COMPUTE]
        compute = sum(e - s for _, s, e in spans)
        filling.append(sum(e - s for op, s, e in spans if op is Op.FILL))
        inner_idle.append(spans[-1][2] - spans[0][1] - compute if spans else 0.0)
        steps = sum(e - s for a, s, e in zip(row, starts, ends, strict=True) if a.op is Op.STEP)
        computing.append(compute)
        busy.append(compute + steps)
    makespan = max((moment for ends in end for moment in ends), default=0.0)
    total = makespan * len(view.actions)
    return Simulation(
        view=view,
        start=tuple(map(tuple, start)),
        end=tuple(map(tuple, end)),
        makespan=makespan,
        busy=tuple(busy),
        computing=tuple(computing),
        bubble_ratio=1.0 - sum(busy) / total if total else 0.0,
        inner_idle=tuple(inner_idle),
        filling=tuple(filling),
    )
