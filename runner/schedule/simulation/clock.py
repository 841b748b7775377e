"""An event simulator: when each action starts and ends, if each takes what its costs say.

Ranks run their lists in order. Compute and STEP occupy their rank. SEND, RECV and REDUCE do not: a SEND
starts once its content is computed and takes the edge's time; a RECV ends when its message is there, and only
the action that needs it waits; the REDUCEs of one rank follow each other beside its compute.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from runner.schedule.values import COMPUTE, CURVATURE, MOVES, Action, Op, Payload, Program, Schedule
from runner.schedule.walk import Step, Walk, walk

__all__ = ["Costs", "Jitter", "Simulation", "StageCosts", "durations", "peak_activations", "play", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Durations, in any one unit, of one rank's whole share of a micro-batch; a chunk costs its part.

    Args:
        F, B, I, W: forward, full backward, gradient of the input, gradient of the weights.
        comm: one message between ranks.
        curvature: K-FAC's sum of one factor of each of its layers.
        inversion: of one factor of each of its layers.
    """

    F: float = 1.0
    B: float = 2.0
    I: float = 1.0  # noqa: E741 - the field's name in the literature
    W: float = 1.0
    comm: float = 0.0
    curvature: float = 0.5
    inversion: float = 1.5

    def per_stage(self, stages: int, chunks: int, parts: int = 1) -> StageCosts:
        """The same durations stage by stage, ``chunks`` of them to a rank, of one of a micro-batch's ``parts``."""

        def each(cost: float) -> tuple[float, ...]:
            return (cost / (chunks * parts),) * stages

        return StageCosts(
            each(self.F),
            each(self.B),
            each(self.I),
            each(self.W),
            comm=(self.comm,) * (stages - 1),
            curvature=(each(self.curvature),) * 2,
            inversion=((self.inversion / chunks,) * stages,) * 2,
        )


@dataclass(frozen=True)
class StageCosts:
    """Durations of each stage for one micro-batch, in any one unit.

    Args:
        F, B, I, W: per stage; ``I`` and ``W`` may be empty where no backward is split.
        comm: per edge between stage s and s+1, either direction; empty means none.
        reduce, step: per stage and optimizer step; empty means none.
        curvature: of K-FAC, per stage: the sums of the factors of inputs, and those of output gradients.
        inversion: likewise, of these factors; of a step, whatever the micro-batches.
    """

    F: Sequence[float]
    B: Sequence[float]
    I: Sequence[float] = ()  # noqa: E741 - the field's name in the literature
    W: Sequence[float] = ()
    comm: Sequence[float] = ()
    reduce: Sequence[float] = ()
    step: Sequence[float] = ()
    curvature: tuple[Sequence[float], Sequence[float]] = ((), ())
    inversion: tuple[Sequence[float], Sequence[float]] = ((), ())


@dataclass(frozen=True)
class Jitter:
    """Chance: everything takes its cost times 1 + ``amount`` times an exponential number of mean 1.

    Every action, and every message, has a number of its own, which depends on nothing but it and the seed, so that
    two orders of the same work meet the same chance.
    """

    amount: float
    seed: int = 0

    def factor(self, action: Action, *, message: bool = False) -> float:
        """Of an action, or of the message that carries what it made."""
        kind = "message" if message else "work"
        return 1.0 + self.amount * random.Random(f"{self.seed} {kind} {action}").expovariate(1.0)


@dataclass(frozen=True)
class Simulation:
    """When everything happens, in the unit of the costs.

    Args:
        start, end: per pipeline rank and index of its list.
        makespan: end of the last action.
        busy: per rank, time under compute and STEP.
        curvature: per rank, time of that under K-FAC's work.
        bubble_ratio: idle / total rank time over the makespan.
        inner_idle: per rank, time without compute between its first and its last compute action.
        peak_activations: per rank, most micro-batches of its whole share held at once, each from the start of
            its F to the end of its B or W. Of a recomputed one the input alone stays between F and R, which
            counts as nothing here.
    """

    start: tuple[tuple[float, ...], ...]
    end: tuple[tuple[float, ...], ...]
    makespan: float
    busy: tuple[float, ...]
    bubble_ratio: float
    inner_idle: tuple[float, ...]
    peak_activations: tuple[float, ...]
    curvature: tuple[float, ...] = ()

    @property
    def utilisation_without_curvature(self) -> float:
        """Share of all rank time under forwards, backwards and STEP."""
        total = self.makespan * len(self.busy)
        return (sum(self.busy) - sum(self.curvature)) / total if total else 0.0


def simulate(view: Schedule | Program, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Simulation:
    """Play ``view``. Linear in its number of actions.

    Args:
        view: in the order of its lists; where ranks may leave it, see
            :func:`runner.schedule.simulation.opportunistic.realised`.
        costs: durations.
        jitter: what they are multiplied by.

    Raises:
        ValueError: if it cannot run to its end, or ``costs`` does not cover its stages.
    """
    return play(view, walk(view), costs, jitter)


def play(view: Schedule | Program, walked: Walk, costs: Costs | StageCosts, jitter: Jitter | None = None) -> Simulation:
    """:func:`simulate` for who has walked ``view`` already."""
    schedule = view.schedule if isinstance(view, Program) else view
    if walked.stuck:
        rank, index, action, missing = walked.stuck[0]
        raise ValueError(f"{schedule.name} hangs: rank {rank} waits at action {index} ({action}) for {missing}")
    if isinstance(costs, Costs):
        costs = costs.per_stage(schedule.stages, schedule.chunks, schedule.parts)
    clock = _Clock(schedule, durations(costs, view), jitter)
    start = [[0.0] * len(row) for row in view.actions]
    end = [[0.0] * len(row) for row in view.actions]
    for step in walked.steps:
        start[step.rank][step.cell], end[step.rank][step.cell] = clock.play(step)
    return _summary(view, schedule, start, end)


def durations(costs: StageCosts, view: Schedule | Program) -> dict[Op, tuple[float, ...]]:
    """Duration by op and stage (for messages: by edge), of every op that ``view`` uses."""
    schedule = view.schedule if isinstance(view, Program) else view
    none = (0.0,) * schedule.stages
    table = {
        Op.F: tuple(costs.F),
        Op.B: tuple(costs.B),
        Op.I: tuple(costs.I),
        Op.W: tuple(costs.W),
        Op.R: tuple(costs.F),
        Op.SEND: tuple(costs.comm) or none[:-1],
        **{op: tuple(cost) for op, cost in zip(_CURVATURE, (*costs.curvature, *costs.inversion), strict=True)},
        Op.REDUCE: tuple(costs.reduce) or none,
        Op.STEP: tuple(costs.step) or none,
    }
    used = {action.op for row in view.actions for action in row} - {Op.RECV} - MOVES | {Op.SEND}
    for op in sorted(used):
        needed = schedule.stages - 1 if op is Op.SEND else schedule.stages
        if len(table[op]) != needed:
            raise ValueError(f"costs of {op}: {len(table[op])} given, {needed} needed for {schedule.stages} stages")
    return table


_CURVATURE = (Op.CURV_A, Op.CURV_B, Op.INV_A, Op.INV_B)


class _Clock:
    """Every rank's time, and when each action ended."""

    def __init__(self, schedule: Schedule, durations: dict[Op, tuple[float, ...]], jitter: Jitter | None) -> None:
        self._schedule = schedule
        self._jitter = jitter
        self._durations = durations
        self._latency = durations[Op.SEND]
        self._free = [0.0] * schedule.ranks
        self._reduce_free = [0.0] * schedule.ranks
        self._ended: dict[Action, float] = {}

    def play(self, step: Step) -> tuple[float, float]:
        rank, _, action, waits_for = step
        op = action.op
        ready = 0.0
        for needed in waits_for:
            arrived = self._ended[needed]
            if needed.stage != action.stage and op in COMPUTE:
                arrived += self._crossing(needed, rank, action.stage)
            if arrived > ready:
                ready = arrived
        start = self._free[rank]
        if op is Op.SEND:
            sent = 0.0 if action.payload is Payload.STASH else self._latency[_edge(action)]
            end = start + sent * self._chance(action)
        elif op is Op.RECV or op in MOVES:
            end = max(start, ready)
        elif op is Op.REDUCE:
            start = max(start, ready, self._reduce_free[rank])
            end = self._reduce_free[rank] = start + self._durations[op][action.stage] * self._chance(action)
        else:
            start = max(start, ready)
            end = self._free[rank] = start + self._durations[op][action.stage] * self._chance(action)
        self._ended[action] = end
        return start, end

    def _crossing(self, needed: Action, rank: int, stage: int) -> float:
        """Time of the message that a compute-only schedule leaves unsaid."""
        assert needed.microbatch is not None  # compute waits for compute and messages only
        if self._schedule.rank_of(needed.stage, needed.microbatch, needed.op) == rank:
            return 0.0
        return self._latency[min(needed.stage, stage)] * self._chance(needed, message=True)

    def _chance(self, action: Action, *, message: bool = False) -> float:
        return 1.0 if self._jitter is None else self._jitter.factor(action, message=message)


def _edge(send: Action) -> int:
    """The edge that a SEND uses, named by its lower stage: activations leave upward, gradients downward."""
    return send.stage - 1 if send.payload == "B" else send.stage


def _summary(
    view: Schedule | Program, schedule: Schedule, start: list[list[float]], end: list[list[float]]
) -> Simulation:
    busy, inner_idle, curvature = [], [], []
    for row, starts, ends in zip(view.actions, start, end, strict=True):
        spans = [(a.op, s, e) for a, s, e in zip(row, starts, ends, strict=True) if a.op in COMPUTE]
        compute = sum(e - s for _, s, e in spans)
        curvature.append(sum(e - s for op, s, e in spans if op in CURVATURE))
        inner_idle.append(spans[-1][2] - spans[0][1] - compute if spans else 0.0)
        steps = sum(e - s for a, s, e in zip(row, starts, ends, strict=True) if a.op is Op.STEP)
        busy.append(compute + steps)
    makespan = max((moment for ends in end for moment in ends), default=0.0)
    total = makespan * len(view.actions)
    return Simulation(
        start=tuple(map(tuple, start)),
        end=tuple(map(tuple, end)),
        makespan=makespan,
        busy=tuple(busy),
        bubble_ratio=1.0 - sum(busy) / total if total else 0.0,
        inner_idle=tuple(inner_idle),
        peak_activations=_peaks_with_moves(view, start, end) if schedule.moves else peak_activations(view),
        curvature=tuple(curvature),
    )


def _peaks_with_moves(
    view: Schedule | Program, start: Sequence[Sequence[float]], end: Sequence[Sequence[float]]
) -> tuple[float, ...]:
    """:func:`peak_activations` where ranks keep others' micro-batches for a while, of full backwards.

    A micro-batch leaves its rank, and is back on it, at the end of the actions that say so.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    changes: list[list[tuple[float, int]]] = [[] for _ in view.actions]
    ended: dict[Action, float] = {}
    for rank, row in enumerate(view.actions):
        for action, begun, done in zip(row, start[rank], end[rank], strict=True):
            ended[action] = done
            if action.op is Op.F:
                changes[rank].append((begun, 1))
            elif action.op is Op.B:
                changes[rank].append((done, -1))
    for rank, row in enumerate(view.actions):
        for action in row:
            if action.payload is Payload.STASH:  # of a program: each end is an action of its own
                changes[rank].append((ended[action], 1 if action.op is Op.RECV else -1))
            elif action.op in MOVES and action.peer is not None:
                sign = 1 if action.op is Op.IN else -1
                changes[rank].append((ended[action], sign))
                changes[action.peer].append((ended[action], -sign))
    return tuple(max(accumulate(step for _, step in sorted(each))) / schedule.chunks for each in changes)


def peak_activations(view: Schedule | Program) -> tuple[float, ...]:
    """Per rank, most micro-batches of its whole share held at once, as in :class:`Simulation`."""
    schedule = view.schedule if isinstance(view, Program) else view
    if schedule.moves:  # what a rank keeps of others' depends on when these move it
        return simulate(view, Costs()).peak_activations
    return tuple(_peak_of_rank(schedule, row) for row in view.actions)


def _peak_of_rank(schedule: Schedule, row: Sequence[Action]) -> float:
    """Most held at once. A rank runs in order, so its list alone decides; without backward an F frees at its end."""
    held = peak = 0
    for action in row:
        op, microbatch = action.op, action.microbatch
        if op is Op.F or op is Op.R:
            held += 1
            peak = max(peak, held)
        if op is Op.B or op is Op.W:
            held -= 1
        elif op is Op.F and microbatch is not None:
            held -= not schedule.backward or schedule.is_recomputed(action.stage, microbatch)
    return peak / (schedule.chunks * schedule.parts)
