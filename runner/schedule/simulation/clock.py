"""An event simulator: it finds when each action starts and ends if each takes the time that its costs say.

Ranks run their lists in order, on the resources of :mod:`runner.schedule.simulation.resources`. For a program,
everything is played: compute, messages, reductions and optimizer steps. For a schedule, only the compute is played:
messages between ranks take their time, but occupy no link, and moves take no time.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from runner.schedule.fills import Filling, FillKind
from runner.schedule.simulation.host_link import StageMoves
from runner.schedule.simulation.peaks import peaks_in_order, peaks_in_time
from runner.schedule.simulation.resources import Chance, Resources
from runner.schedule.simulation.weight_link import WeightRun
from runner.schedule.values import COMPUTE, MOVES, Action, Op, Program, Schedule
from runner.schedule.walk import Walk, walk

__all__ = ["Costs", "Jitter", "Simulation", "StageCosts", "durations", "peak_activations", "play", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Durations of a rank's whole share of a micro-batch, all in one unit. A chunk takes its part of them.

    Where micro-batches differ in size, they are those of the largest.

    Args:
        F: duration of a forward.
        B: duration of a full backward.
        I: duration of the gradient of the input.
        W: duration of the gradient of the weights.
        comm: duration of one message between ranks.
        fills: durations of fills, by the key of ``cost.*`` that their kinds name; other kinds take their default cost.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741 - the field's name in the literature
    W: float = 1.0
    comm: float = 0.0
    fills: Mapping[str, float] = field(default_factory=dict)

    def of_fill(self, kind: FillKind) -> float:
        """The duration of one fill of a kind."""
        return self.fills.get(kind.cost, kind.default_cost)

    def per_stage(self, stages: int, chunks: int, parts: float = 1, filling: Filling | None = None) -> StageCosts:
        """The same durations stage by stage.

        Args:
            stages: number of stages.
            chunks: number of stages that a rank has.
            parts: how many times as large a micro-batch is as that of which the result is, e.g. of which it is a part.
            filling: the work that fills bubbles, or None.
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
    """Durations of each stage for one micro-batch, all in one unit. An empty sequence means zeros.

    Args:
        F: duration of the forward of each stage.
        B: duration of the full backward of each stage.
        I: duration of the gradient of the input of each stage; must be given if a backward is split.
        W: duration of the gradient of the weights of each stage; must be given if a backward is split.
        comm: duration of a message between stages s and s + 1, in either direction, for each s.
        reduce: duration of the reduction of each stage, once per optimizer step.
        step: duration of the optimizer step of each stage.
        fills: durations of one fill of each stage, by the name of its kind; a kind that is not there takes no time.
        stash: duration of sending a stash of each stage to another rank.
        occupancy: the part of ``comm`` in which a message occupies its link; if it is zero, no message waits for
            another.
        moves: what each stage moves to the host's memory and back.
        weights: for each rank, how weights come from the host's memory while its forwards and backwards run.
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
    moves: Sequence[StageMoves] = ()
    weights: Sequence[Mapping[tuple[bool, int, int], WeightRun]] = ()


@dataclass(frozen=True)
class Jitter:
    """Random durations: everything takes its cost times 1 + ``amount`` x, with x exponentially distributed of mean 1.

    Every action and every message has its own x, which depends only on it and the seed. So two orders of the same work
    get the same durations.
    """

    amount: float
    seed: int = 0

    def factor(self, action: Action, *, message: bool = False) -> float:
        """The factor of an action, or of the message that carries what the action made."""
        kind = "message" if message else "work"
        return 1.0 + self.amount * random.Random(f"{self.seed} {kind} {action}").expovariate(1.0)


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation: all times, in the unit of the costs.

    Args:
        view: the schedule or program that was played.
        start, end: start and end of each action, by pipeline rank and index in its list.
        makespan: end of the last action.
        busy: for each rank, its time in compute and STEP.
        computing: for each rank, its time in compute.
        bubble_ratio: idle time / total time of all ranks over the makespan.
        inner_idle: for each rank, its time without compute between its first and its last compute action.
        filling: for each rank, its time in fills, which is a part of that in compute.
        waiting_for_host: for each rank, its time of waiting for moves to the host and back, also a part of that.
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
    waiting_for_host: tuple[float, ...] = ()

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the largest number of micro-batches held at once, in units of the rank's whole share.

        A micro-batch is held from the start of its F to the end of its B or W. A recomputed micro-batch does not count
        between F and R, where only its input stays. What a rank keeps for another rank counts.
        """
        schedule = self.view.schedule if isinstance(self.view, Program) else self.view
        return peaks_in_time(self.view, self.start, self.end) if schedule.moves else peaks_in_order(self.view)

    def last(self, ops: Collection[Op]) -> float:
        """The moment when the last action with one of these ops ends; 0 if there is none."""
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
        jitter: random factors of the durations; None means that the durations are exact.

    Raises:
        ValueError: ``view`` cannot run to its end, or ``costs`` does not have an entry for each of its stages.
    """
    return play(view, walk(view), costs, jitter)


def play(view: Schedule | Program, walked: Walk, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Simulation:
    """Do the same as :func:`simulate`, for a caller that has walked ``view`` already."""
    schedule = view.schedule if isinstance(view, Program) else view
    if walked.stuck:
        rank, index, action, missing = walked.stuck[0]
        raise ValueError(f"{schedule.name} hangs: rank {rank} waits at action {index} ({action}) for {missing}")
    if isinstance(costs, Costs):
        whole = schedule.parts * schedule.largest_size  # of it the costs are, and the result is of the mean part
        costs = costs.per_stage(schedule.stages, schedule.chunks, whole, schedule.filling)
    stash = _complete("a stash", costs.stash, schedule.stages)
    occupancy = _complete("a link's occupancy", costs.occupancy, schedule.stages - 1)
    chance = _chances(jitter)
    resources = Resources(view, durations(costs, view), stash, occupancy, chance, costs.moves, costs.weights)
    resources.play(walked.steps)
    return _summary(view, resources.start, resources.end, resources.waited_for_host)


def peak_activations(view: Schedule | Program) -> tuple[float, ...]:
    """For each rank, the largest number of micro-batches held at once, as :class:`Simulation` defines it."""
    schedule = view.schedule if isinstance(view, Program) else view
    if schedule.moves:  # the number that a rank keeps for others depends on the times of the moves
        return simulate(view, Costs()).peak_activations
    return peaks_in_order(view)


def _complete(name: str, costs: Sequence[float], needed: int) -> Sequence[float]:
    """The given costs, or as many zeros as are needed if none are given."""
    if costs and len(costs) != needed:
        raise ValueError(f"costs of {name}: {len(costs)} given, {needed} needed")
    return costs or (0.0,) * needed


def _chances(jitter: Jitter | None) -> Chance:
    if jitter is None:
        return lambda action, message: 1.0
    return lambda action, message: jitter.factor(action, message=message)


def durations(costs: StageCosts, view: Schedule | Program) -> dict[str, tuple[float, ...]]:
    """The durations of every op and kind of fill that ``view`` uses, one for each stage; for SEND, one for each edge.

    An edge is the boundary between two neighbouring stages.

    Raises:
        ValueError: ``costs`` does not have an entry for each stage.
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


def _summary(
    view: Schedule | Program, start: list[list[float]], end: list[list[float]], waited: tuple[float, ...]
) -> Simulation:
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
        waiting_for_host=waited,
    )
