"""Peak memory of each rank: what it holds all the time, and the bytes of what comes and goes.

:mod:`runner.schedule.liveness` says from which action to which something lives; :mod:`runner.plan.memory.rank_walk`
adds up its bytes. Gradients of weights are one persistent flat buffer, reduced in place. The ranks of the first and the
last stage hold a whole step's inputs and targets.
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

_TEMPORARIES = 2  # of Adam and its kin


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
        program: one replica's lowered schedule; where its ranks may leave its order, of the order that holds most.
        profile: of the step's largest micro-batch.
        figures: of each stage, from the same profile.
        batch_samples: samples of one optimizer step on one replica.
        temporaries: see :class:`runner.optim.catalogue.kind.OptimizerKind`.
        sharing: how replicas share out weights, gradients and states; None: each holds all.
        states_over: replicas that share out nothing but the optimizer's states.
        flattened: bytes of gradients, at most, that are copied together to be reduced.
        accelerated: the host's memory is another one than the device's.
        backup: each rank keeps a copy of its weights and optimizer states, for post-validation.
        copied_by: so many replicas share out a copy of each stage's, on the host, while they save it in the background.
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
    """Per stage, how many micro-batches are at once between the start of their forward and the end of their backward.

    Where another rank runs the backward, its recomputation takes the place of the forward.
    """
    most = [0] * schedule.stages
    rows = hurried(schedule)
    for row, living in zip(rows, lifetimes(schedule, rows), strict=True):
        by_stage: dict[int, dict[int | None, Lifetime]] = defaultdict(dict)  # stage -> micro-batch -> its whole time
        for each in living:
            if each.kind in _KEPT:
                first = by_stage[each.stage].setdefault(each.microbatch, each)
                by_stage[each.stage][each.microbatch] = first._replace(ends=each.ends)
        for stage, whole in by_stage.items():
            most[stage] = max(most[stage], most_at_once(row, whole.values()))
    return tuple(most)


_KEPT = (Kind.SAVED, Kind.DEFERRED, Kind.OUTPUT)
"""What a stage keeps of a micro-batch between its forward and its backward, in the order of :class:`Held`."""


class Held(NamedTuple):
    """How many micro-batches of one stage are held at one moment, by what is kept of them."""

    saved: int
    deferred: int  # I is done, W is not
    dropped: int  # F is done, R is not


def held_microbatches(schedule: Schedule) -> tuple[tuple[Held, ...], ...]:
    """Per stage, how much is held while its forwards and recomputations run; only the largest moments are returned.

    The micro-batch that runs counts as saved. What a rank has sent to another one is not counted meanwhile, and what it
    keeps for another one belongs to none of its stages.
    """
    moments: list[set[Held]] = [set() for _ in range(schedule.stages)]
    rows = hurried(schedule)
    for row, living in zip(rows, lifetimes(schedule, rows), strict=True):
        changes: dict[Action | None, list[tuple[int, int]]] = defaultdict(list)  # of which count, by how much
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
    """The moments that no other moment exceeds or equals in everything."""
    for one in sorted(moments):
        if not any(one != other and all(a <= b for a, b in zip(one, other, strict=True)) for other in moments):
            yield one


@dataclass(frozen=True)
class StageMemoryLimit:
    """Says which layers fit a stage, by its own part of its rank's limit and its micro-batches in flight.

    It is a bound for the partition's search; in the end the walk of the rank decides.

    Args:
        profile: of the largest micro-batch.
        in_flight: per stage: most at once, as (saved, left to W, outputs of forwards that are recomputed).
        limit_bytes: per stage: its rank's limit / the rank's stages, without what the rank holds anyway.
        held_bytes: per stage: the part of what its rank holds anyway that counts for it.
        temporaries: see :class:`runner.optim.catalogue.kind.OptimizerKind`.
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
    delays: tuple[int, ...] = ()

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
        return cls(profile, held_microbatches(schedule), *kept, delays=schedule.delays)

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether the stage's states and its in-flight micro-batches are within its part of the limit."""
        return self._own_peak(first, last, stage) <= self.limit_bytes[stage]

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether what only grows with more layers is already over the limit."""
        return self._own_floor(first, last, stage) > self.limit_bytes[stage]

    def peak_bytes(self, first: int, last: int, stage: int) -> int:
        """The stage's peak with these layers, and its part of what its rank holds anyway."""
        return self.held_bytes[stage] + self._own_peak(first, last, stage)

    def floor_bytes(self, first: int, last: int, stage: int) -> int:
        """A lower bound of :meth:`peak_bytes` of these layers, alone or with more layers before ``first``."""
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
        """The bytes of the stage's micro-batches at the moment when these are most."""
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
        older = self.delays[stage] * figures.gradient_bytes if self.delays else 0
        return older + figures.weight_bytes + figures.gradient_bytes + figures.optimizer_bytes // self.states_over


def _batch_bytes(profile: ModelProfile, schedule: Schedule, rank: int, samples: int) -> int:
    """The bytes of a step's batch on a rank: inputs where the first stage is, targets where the last one is."""
    stages = schedule.stages_of(rank)
    inputs = profile.input_bytes if 0 in stages else 0
    targets = profile.target_bytes if schedule.stages - 1 in stages else 0
    return -(-(inputs + targets) * samples // profile.samples)


def _older_versions(schedule: Schedule, figures: Sequence[StageFigures], stages: Iterable[int]) -> int:
    """Bytes of the trained weights besides the newest that later windows read; a gradient is as large as its weight."""
    if not schedule.is_asynchronous:
        return 0
    return sum(schedule.delays[stage] * figures[stage].gradient_bytes for stage in stages)


def _states(stages: Sequence[StageFigures], profile: ModelProfile, batch_bytes: int) -> MemoryParts:
    """What a rank holds all the time. A weight that several of its layers share counts once."""
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
    """The bytes of weights and optimizer states that checkpoints take from this rank: of twins, from the first."""
    saved = [figures[stage] for stage, holder in enumerate(schedule.placement[0]) if holder == rank]
    states = _states(saved, profile, 0)
    return states.weights + states.optimizer


def _spare_copies(weight: SharedWeight, stages: Sequence[StageFigures]) -> int:
    """How often too much these stages' layers count a weight that is there once."""
    uses = sum(stage.first <= layer <= stage.last for layer in weight.layers for stage in stages)
    return max(0, uses - 1)


def _shared_states(
    sharing: ZeroSharing, stage: StageFigures, batch_bytes: int, *, accelerated: bool
) -> tuple[MemoryParts, int]:
    """What a rank holds beside activations, and how many bytes more the end of its step takes."""
    held, more = sharing.held(stage), sharing.backward_extra(stage)
    here = 0 if accelerated else held.host  # what is offloaded stays in the one memory
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
    """The same with the optimizer's states shared out over replicas, and the bytes that a step makes and drops.

    These are the gradients and temporaries of the own part, and then the updated parts of all replicas.
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
