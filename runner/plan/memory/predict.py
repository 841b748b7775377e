"""Predicts the peak memory of each rank, from what it holds all the time and the bytes of what comes and goes.

:mod:`runner.schedule.liveness` says from which action to which a tensor is alive, and
:mod:`runner.plan.memory.rank_walk` adds up the bytes. Gradients of weights are in one persistent flat buffer, and are
reduced in place. The rank of the first stage holds the inputs of a whole step, and that of the last stage its targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

from runner.plan.memory.rank_walk import RankWalk
from runner.plan.memory.zero import StateBytes, ZeroSharing
from runner.plan.stages.figures import LayerRanges, StageFigures, state_bytes
from runner.plan.values import MemoryParts, MemoryPrediction
from runner.profile import ModelProfile, SharedWeight
from runner.schedule.liveness import Kind, Lifetime, lifetimes, most_at_once
from runner.schedule.simulation.opportunistic import hurried
from runner.schedule.values import Action, Op, Program, Schedule

__all__ = [
    "StageMemoryLimit",
    "in_flight_microbatches",
    "predict_memory",
]

_TEMPORARIES = 2  # temporary tensors of Adam and similar optimizers


def predict_memory(
    program: Program,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    *,
    batch_samples: int,
    temporaries: int = _TEMPORARIES,
    backup: bool = False,
    copied_by: int | None = None,
    sharing: ZeroSharing | None = None,
    states_over: int = 1,
    flattened: int = 0,
    accelerated: bool = True,
) -> MemoryPrediction:
    """The memory of each pipeline rank at its peak.

    Args:
        program: the lowered schedule of one replica. If its ranks may leave its order, the prediction is for the order
            that keeps most activations.
        profile: the profile for the step's largest micro-batch.
        figures: the figures of each stage, from the same profile.
        batch_samples: number of samples of one optimizer step on one replica.
        temporaries: see :class:`runner.optim.catalogue.kind.OptimizerKind`.
        backup: whether each rank keeps a copy of its weights and optimizer states, for post-validation.
        copied_by: number of replicas that share a copy of each stage's weights and states in the host's memory while
            they save it in the background; None if checkpoints are not saved in the background.
        sharing: how ZeRO shards weights, gradients and states over replicas; None if each replica holds all of them.
        states_over: number of replicas over which only the optimizer's states are sharded.
        flattened: largest number of bytes of gradients that are copied into one tensor to be reduced.
        accelerated: whether the device has its own memory, separate from the host's.
    """
    schedule = program.schedule
    parts, host, kept = [], [], []
    rows = hurried(program)
    living = lifetimes(program, rows)
    for rank, actions in enumerate(rows):
        stages = schedule.stages_of(rank)
        batch = _batch_bytes(profile, schedule, rank, batch_samples)
        held = [figures[stage] for stage in stages]
        if sharing is None:
            states = _states(held, profile, batch)
            states = replace(states, weights=states.weights + _older_versions(schedule, figures, stages))
            step_bytes = max((_temporary_bytes(one, profile, temporaries) for one in held), default=0)
            step_bytes += _wide_gradients(held, profile)
            if states_over > 1:
                states, step_bytes = _over_replicas(states, temporaries, states_over)
            step_bytes = max(step_bytes, *(min(flattened, one.gradient_bytes) for one in held))
            kept.append(StateBytes(states.weights, states.gradients, states.optimizer, 0))
        else:
            kept.append(sharing.between_backwards(held[0]))
            states, step_bytes = _shared_states(sharing, held[0], batch, accelerated=accelerated)
        if backup:
            trained = states.gradients  # a gradient is as large as its weight
            states = replace(states, buffers=states.buffers + trained + states.optimizer)
        copy = _copied_bytes(figures, profile, schedule, rank) // copied_by if copied_by is not None else 0
        if not accelerated:
            states = replace(states, buffers=states.buffers + copy)
        parts.append(RankWalk(schedule, rank, figures, states, step_bytes).peak(actions, living[rank]))
        offloaded = sharing.held(held[0]).host if sharing is not None else 0
        host.append(offloaded + copy if accelerated else 0)
    return MemoryPrediction(tuple(parts), tuple(host), tuple(kept))


def in_flight_microbatches(schedule: Schedule) -> tuple[int, ...]:
    """For each stage, the largest number of micro-batches between the start of forward and the end of backward.

    If another rank runs the backward, the recomputation on that rank counts instead of the forward.
    """
    most = [0] * schedule.stages
    rows = hurried(schedule)
    for row, living in zip(rows, lifetimes(schedule, rows), strict=True):
        by_stage: dict[int, dict[int | None, Lifetime]] = defaultdict(dict)  # stage -> micro-batch -> whole lifetime
        for each in living:
            if each.kind in _KEPT:
                first = by_stage[each.stage].setdefault(each.microbatch, each)
                by_stage[each.stage][each.microbatch] = first._replace(ends=each.ends)
        for stage, whole in by_stage.items():
            most[stage] = max(most[stage], most_at_once(row, whole.values()))
    return tuple(most)


_KEPT = (Kind.SAVED, Kind.DEFERRED, Kind.OUTPUT)
"""The kinds of things that a stage keeps between a forward and its backward, in the order of :class:`Held`."""


class Held(NamedTuple):
    """The numbers of micro-batches of one stage that are held at one moment, by what is kept of them."""

    saved: int
    deferred: int  # I is done, but W is not
    dropped: int  # F is done, but R is not


def held_microbatches(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """For each stage, the micro-batches held while its forwards and recomputations run, at the largest moments.

    The micro-batch that runs counts as saved. What a rank has lent to another rank does not count in the meantime, and
    what it keeps for another rank belongs to none of its stages.
    """
    moments: list[set[Held]] = [set() for _ in range(schedule.stages)]
    rows = hurried(schedule)
    for row, living in zip(rows, lifetimes(schedule, rows), strict=True):
        changes: dict[Action | None, list[tuple[int, int]]] = defaultdict(list)  # action -> (index in Held, change)
        for each in living:
            if each.kind in _KEPT:
                changes[each.begins].append((_KEPT.index(each.kind), 1))
                changes[each.ends].append((_KEPT.index(each.kind), -1))
        counts: dict[int, list[int]] = defaultdict(lambda: [0] * len(_KEPT))
        for action in row:
            now = counts[action.stage]
            if action.op is Op.F or action.op is Op.R:
                saved, deferred, dropped = now
                moments[action.stage].add(Held(saved + 1, deferred, dropped))
            for count, by in changes[action]:
                now[count] += by
    return tuple(tuple(_largest(found)) for found in moments)


def _largest(moments: set[Held]) -> Iterator[Held]:
    """The moments that are not exceeded by another moment that is at least as large in all numbers."""
    for one in sorted(moments):
        if not any(one != other and all(a <= b for a, b in zip(one, other, strict=True)) for other in moments):
            yield one


@dataclass(frozen=True)
class StageMemoryLimit:
    """Says which layers fit into a stage, whose limit is an equal part of its rank's limit.

    It is a bound for the search for a partition; the final decision comes from the walk of the whole rank.

    Args:
        profile: the profile for the largest micro-batch.
        in_flight: for each stage, the largest numbers of micro-batches held at once.
        limit_bytes: for each stage, the limit of its rank, without the batch that the rank holds, divided by the number
            of the rank's stages.
        held_bytes: for each stage, its equal part of the batch that its rank holds.
        temporaries: see :class:`runner.optim.catalogue.kind.OptimizerKind`.
        sharing, states_over, flattened, accelerated: see :func:`predict_memory`.
        delays: see :class:`runner.schedule.values.Schedule`.
    """

    profile: ModelProfile
    in_flight: tuple[tuple[Held, ...], ...]
    limit_bytes: tuple[int, ...]
    held_bytes: tuple[int, ...]
    temporaries: int = _TEMPORARIES
    sharing: ZeroSharing | None = None
    states_over: int = 1
    flattened: int = 0
    accelerated: bool = True
    older: tuple[int, ...] = ()

    @cached_property
    def _figures(self) -> Callable[[int, int], StageFigures]:
        return cache(LayerRanges(self.profile).figures)  # the search asks for one range at many stages

    @classmethod
    def of(
        cls,
        profile: ModelProfile,
        schedule: Schedule,
        rank_limit_bytes: int,
        *,
        batch_samples: int,
        temporaries: int,
        sharing: ZeroSharing | None = None,
        states_over: int = 1,
        flattened: int = 0,
        accelerated: bool = True,
    ) -> StageMemoryLimit:
        """The limit of each stage of a schedule whose ranks may use ``rank_limit_bytes``."""
        limits = [rank_limit_bytes] * schedule.stages
        parts = [0] * schedule.stages
        for rank in range(schedule.ranks):
            stages = schedule.stages_of(rank)
            held = _batch_bytes(profile, schedule, rank, batch_samples)
            for stage in stages:
                limits[stage] = min(limits[stage], (rank_limit_bytes - held) // len(stages))
                parts[stage] = max(parts[stage], held // len(stages))
        kept = (tuple(limits), tuple(parts), temporaries, sharing, states_over, flattened, accelerated)
        return cls(
            profile,
            held_microbatches(schedule),
            *kept,
            older=tuple(map(schedule.older_versions, range(schedule.stages))),
        )

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether the stage's states and its micro-batches in flight are within its part of the limit."""
        return self._own_peak(first, last, stage) <= self.limit_bytes[stage]

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether these layers exceed the limit, even as a part of a larger stage."""
        return self._own_floor(first, last, stage) > self.limit_bytes[stage]

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        """The stage's peak with these layers, including its part of the batch that its rank holds."""
        return self.held_bytes[stage] + self._own_peak(first, last, stage)

    def floor_bytes(self, first: int, last: int, stage: int) -> int:
        """A lower bound of :meth:`peak_bytes` of these layers, alone or together with more layers before ``first``."""
        return self.held_bytes[stage] + self._own_floor(first, last, stage)

    def _own_peak(self, first: int, last: int, stage: int) -> int:
        figures = self._figures(first, last)
        others = self._held(figures, stage) - figures.saved_bytes + figures.input_bytes
        forward = others + figures.forward_peak_bytes
        backward = others + figures.saved_bytes + figures.output_gradient_bytes + figures.backward_peak_bytes
        return self._states(figures, stage) + max(forward, backward, self._step(figures))

    def _own_floor(self, first: int, last: int, stage: int) -> int:
        figures = self._figures(first, last)
        least = max(held.saved * figures.saved_bytes for held in self.in_flight[stage])
        return self._states(figures, stage) + least

    def _held(self, figures: StageFigures, stage: int) -> int:
        """The bytes of the stage's micro-batches in flight at the moment when these are largest."""
        return max(
            held.saved * (figures.saved_bytes + figures.input_bytes)
            + held.deferred * (figures.deferred_bytes + figures.deferred_input_bytes)
            + held.dropped * (figures.output_bytes + figures.input_bytes)
            for held in self.in_flight[stage]
        )

    def _step(self, figures: StageFigures) -> int:
        if self.sharing is not None:
            return _shared_states(self.sharing, figures, 0, accelerated=self.accelerated)[1]
        update = _temporary_bytes(figures, self.profile, self.temporaries) + _wide_gradients([figures], self.profile)
        return max(update, min(self.flattened, figures.gradient_bytes))

    def _states(self, figures: StageFigures, stage: int) -> int:
        if self.sharing is not None:
            return _shared_states(self.sharing, figures, 0, accelerated=self.accelerated)[0].total
        older = self.older[stage] * figures.gradient_bytes if self.older else 0
        return older + figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes // self.states_over


def _batch_bytes(profile: ModelProfile, schedule: Schedule, rank: int, samples: int) -> int:
    """The bytes of a step's batch on a rank: inputs where the first stage is, targets where the last one is."""
    stages = schedule.stages_of(rank)
    inputs = profile.input_bytes if 0 in stages else 0
    targets = profile.target_bytes if schedule.stages - 1 in stages else 0
    return -(-(inputs + targets) * samples // profile.samples)


def _older_versions(schedule: Schedule, figures: Sequence[StageFigures], stages: Iterable[int]) -> int:
    """The bytes of older versions of trained weights that are held; a gradient is as large as its weight."""
    if not schedule.is_asynchronous:
        return 0
    return sum(schedule.older_versions(stage) * figures[stage].gradient_bytes for stage in stages)


def _states(stages: Sequence[StageFigures], profile: ModelProfile, batch_bytes: int) -> MemoryParts:
    """The bytes that a rank holds all the time. A weight that several of its layers share counts once."""
    spare = [(weight, _spare_copies(weight, stages)) for weight in profile.shared]
    gradients = sum(stage.gradient_bytes for stage in stages) - sum(n * weight.gradient_bytes for weight, n in spare)
    ratio = profile.optimizer_bytes_per_gradient_byte
    spare_states = sum(n * state_bytes(weight, ratio) for weight, n in spare)
    return MemoryParts(
        weights=sum(stage.weight_bytes for stage in stages) - sum(n * weight.weight_bytes for weight, n in spare),
        gradients=gradients,
        optimizer=round(sum(stage.optimizer_bytes for stage in stages) - spare_states)
        + profile.optimizer_constant_bytes,
        activations=0,
        buffers=batch_bytes,
    )


def _copied_bytes(figures: Sequence[StageFigures], profile: ModelProfile, schedule: Schedule, rank: int) -> int:
    """The bytes of weights and optimizer states that checkpoints take from this rank, which is none for later twins."""
    saved = [figures[stage] for stage, holder in enumerate(schedule.placement[0]) if holder == rank]
    states = _states(saved, profile, 0)
    return states.weights + states.optimizer


def _spare_copies(weight: SharedWeight, stages: Sequence[StageFigures]) -> int:
    """How often the figures of these stages count a shared weight again, which is held only once."""
    uses = sum(stage.first <= layer <= stage.last for layer in weight.layers for stage in stages)
    return max(0, uses - 1)


def _shared_states(
    sharing: ZeroSharing, stage: StageFigures, batch_bytes: int, *, accelerated: bool
) -> tuple[MemoryParts, int]:
    """The bytes that a rank holds beside activations under ZeRO, and further bytes at the end of its step."""
    held, more = sharing.held(stage), sharing.backward_extra(stage)
    here = 0 if accelerated else held.host  # without a separate host, offloaded states stay in the same memory
    update = sharing.update_extra(stage) + (0 if accelerated else sharing.update_extra_host(stage))
    end = max(update, sharing.reduction_extra(stage).device)
    states = MemoryParts(
        weights=held.weights + more.weights,
        gradients=held.gradients + more.gradients,
        optimizer=held.optimizer + here,
        activations=0,
        buffers=held.buffers + more.buffers + batch_bytes,
    )
    return states, max(0, end - more.device)


def _over_replicas(states: MemoryParts, temporaries: int, replicas: int) -> tuple[MemoryParts, int]:
    """Shard the optimizer's states over replicas; return the new parts and the bytes that a step makes and drops.

    A step makes the gradients and temporary tensors of its own part, and then the updated parts of all replicas.
    """
    part = -(-states.gradients // replicas)
    shared = replace(states, optimizer=-(-states.optimizer // replicas))
    return shared, max((1 + temporaries) * part, part * replicas)


def _wide_gradients(stages: Sequence[StageFigures], profile: ModelProfile) -> int:
    """The bytes of master weights' fp32 gradients, which a step makes and drops for all stages of a rank together."""
    return round(profile.master_bytes_per_gradient_byte * sum(stage.gradient_bytes for stage in stages))


def _temporary_bytes(figures: StageFigures, profile: ModelProfile, temporaries: int) -> int:
    width = profile.master_bytes_per_gradient_byte or 1.0
    return round(temporaries * width * figures.largest_parameter_bytes)
