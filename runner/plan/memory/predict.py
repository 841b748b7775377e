"""Predicts the peak memory of each rank, from what it holds all the time and the bytes of what comes and goes.

:mod:`runner.schedule.liveness` says from which action to which a tensor is alive, and
:mod:`runner.plan.memory.rank_walk` adds up the bytes. Gradients of weights are in one persistent flat buffer, and are
reduced in place. The rank of the first stage holds the inputs of a whole step, and that of the last stage its targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from runner.plan.memory.extra import ExtraCopies, older_versions, with_extra
from runner.plan.memory.held import KEPT, hurried_lifetimes
from runner.plan.memory.needs import MemoryNeeds
from runner.plan.memory.rank_walk import HeldBytes, RankWalk
from runner.plan.memory.saved_copies import saved_copies
from runner.plan.memory.zero import ZeroSharing
from runner.plan.reductions import Reduction, compressing_bytes
from runner.plan.stages.figures import StageFigures, state_bytes
from runner.plan.values import MemoryParts, MemoryPrediction, StateBytes
from runner.profile import ModelProfile, SharedWeight
from runner.schedule.liveness import Kind, Lifetime, most_at_once
from runner.schedule.remembered import remembered
from runner.schedule.stream import streams_of
from runner.schedule.values import Program, Schedule

__all__ = [
    "batch_bytes",
    "in_flight_microbatches",
    "predict_memory",
    "shared_states",
    "steps_under_way",
    "temporary_bytes",
    "wide_gradients",
]

_COUNT = 8  # bytes of a count of steps, at most; an optimizer's state of a weight has one


def predict_memory(
    program: Program,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    needs: MemoryNeeds,
    planned_reductions: Sequence[Reduction] = (),
) -> MemoryPrediction:
    """The memory of each pipeline rank at its peak.

    Args:
        program: the lowered schedule of one replica. If its ranks may leave its order, the prediction is for the order
            that keeps most activations.
        profile: the profile for the step's largest micro-batch.
        figures: the figures of each stage, from the same profile.
        needs: what else is held and needed.
        planned_reductions: what compressors of gradients keep and need, for each stage; empty if there are none.
    """
    schedule, sharing = program.schedule, needs.sharing
    if sharing is not None:
        figures = [_with_divided_gradient(sharing.in_backward(one)) for one in figures]
    extra = needs.extra or older_versions(schedule)
    predicting = [one.temporaries * each.largest_parameter_bytes for one, each in zip(extra, figures, strict=True)]
    parts, host, kept = list[tuple[MemoryParts, ...]](), [], []
    rows, living = hurried_lifetimes(program)
    for rank, actions in enumerate(rows):
        stages = schedule.stages_of(rank)
        batch = steps_under_way(program) * batch_bytes(profile, schedule, rank, needs.batch_samples)
        held = [figures[stage] for stage in stages]
        if sharing is not None:
            kept.append(sharing.between_backwards(held[0]))
            offloaded = sharing.held(held[0]).host
            every = [
                shared_states(sharing, held[0], batch, accelerated=needs.accelerated, replica=replica)
                for replica in range(sharing.replicas)
            ]
        else:
            planned = [planned_reductions[stage] for stage in stages] if planned_reductions else []
            states, step_bytes = _own_states(held, [extra[stage] for stage in stages], profile, batch, needs, planned)
            every = [HeldBytes(states, step_bytes)]
            offloaded = sum(one.home_bytes for one in held)
            kept.append(StateBytes(states.weights, states.gradients, states.optimizer, 0, offloaded))
        copy = _copied_bytes(figures, profile, schedule, rank, needs.copied_by, planned_reductions)
        here = 0 if needs.accelerated else copy
        own_layers = [layer for one in held for layer in profile.layers[one.first : one.last + 1]]
        backup = sum(len(layer.trained_shapes) for layer in own_layers) if needs.backup else None
        every = [replace(own, states=_with_copies(own.states, backup=backup, copy=here)) for own in every]
        walk = RankWalk(schedule, rank, figures, predicting, planned_reductions)
        parts.append(walk.peaks(actions, living[rank], every))
        host.append(offloaded + copy if needs.accelerated else 0)
    fullest = tuple(max(own, key=lambda each: each.total) for own in parts)
    differing = tuple(parts) if any(len(set(own)) > 1 for own in parts) else ()
    return MemoryPrediction(fullest, tuple(host), tuple(kept), of_replicas=differing)


def _own_states(
    held: Sequence[StageFigures],
    extra: Sequence[ExtraCopies],
    profile: ModelProfile,
    batch: int,
    needs: MemoryNeeds,
    planned: Sequence[Reduction],
) -> tuple[MemoryParts, int]:
    """The bytes that a rank without ZeRO holds beside activations, and further bytes at the end of its step."""
    states = with_extra(_states(held, profile, batch), zip(extra, held, strict=True))
    step_bytes = max((temporary_bytes(one, profile, needs) for one in held), default=0)
    step_bytes = max(step_bytes, round(needs.at_once * sum(one.gradient_bytes for one in held)))
    step_bytes += wide_gradients(held, profile)
    states = replace(states, optimizer=states.optimizer + sum(each.kept_bytes for each in planned))
    renewed = sum(each.kept_bytes for each in planned)  # replaces what was kept before once the step is made
    step_bytes = max(step_bytes + renewed, compressing_bytes(planned))
    if needs.states_over is not None:
        norms = needs.norm_copies * max((one.largest_parameter_bytes for one in held), default=0)
        states, step_bytes = _over_replicas(
            states, needs, needs.states_over, _padding(held, profile, needs.states_over)
        )
        step_bytes = max(step_bytes, norms)
    return states, max(step_bytes, *(min(needs.flattened, one.gradient_bytes) for one in held))


def steps_under_way(program: Program) -> int:
    """The most steps that have begun on a rank and have not ended: each holds its batch, and its loss."""
    return 1 + (streams_of(program)[0].overlap if program.schedule.is_asynchronous else 0)


def _with_copies(states: MemoryParts, *, backup: int | None, copy: int) -> MemoryParts:
    """Add the copies that a rank keeps of weights and states.

    Args:
        states: what it holds.
        backup: the number of weights of which it keeps copies for an undo; None: it keeps none.
        copy: bytes for a checkpoint.
    """
    trained = states.gradients  # a gradient is as large as its weight
    kept = 0 if backup is None else trained + states.optimizer + backup * _COUNT
    return replace(states, buffers=states.buffers + kept + copy)


@remembered
def in_flight_microbatches(schedule: Schedule, kinds: tuple[Kind, ...] = KEPT) -> tuple[int, ...]:
    """For each stage, the largest number of micro-batches between the start of forward and the end of backward.

    If another rank runs the backward, the recomputation on that rank counts instead of the forward.

    Args:
        schedule: the schedule of one replica.
        kinds: what of a micro-batch must be alive; by default anything that a stage keeps.
    """
    most = [0] * schedule.stages
    for row, living in zip(*hurried_lifetimes(schedule), strict=True):
        by_stage: dict[int, dict[int | None, Lifetime]] = defaultdict(dict)  # stage -> micro-batch -> whole lifetime
        for each in living:
            if each.kind in kinds:
                first = by_stage[each.stage].setdefault(each.microbatch, each)
                by_stage[each.stage][each.microbatch] = first._replace(ends=each.ends)
        for stage, whole in by_stage.items():
            most[stage] = max(most[stage], int(most_at_once(row, whole.values())))
    return tuple(most)


def batch_bytes(profile: ModelProfile, schedule: Schedule, rank: int, samples: int) -> int:
    """The bytes of a step's batch on a rank: inputs where the first stage is, targets where the last one is."""
    stages = schedule.stages_of(rank)
    inputs = profile.input_bytes if 0 in stages else 0
    targets = profile.target_bytes if schedule.stages - 1 in stages else 0
    return -(-(inputs + targets) * samples // profile.samples)


def _states(stages: Sequence[StageFigures], profile: ModelProfile, batch_bytes: int) -> MemoryParts:
    """The bytes that a rank holds all the time. A weight that several of its layers share counts once."""
    spare = [(weight, _spare_copies(weight, stages)) for weight in profile.shared]
    gradients = sum(stage.gradient_bytes for stage in stages) - sum(n * weight.gradient_bytes for weight, n in spare)
    ratio = profile.optimizer_bytes_per_gradient_byte
    spare_states = sum(n * state_bytes(weight, ratio) for weight, n in spare)
    return MemoryParts(
        weights=sum(stage.weight_bytes - stage.home_weight_bytes for stage in stages)
        - sum(n * weight.weight_bytes for weight, n in spare),
        gradients=gradients - sum(stage.home_gradient_bytes for stage in stages),
        optimizer=round(sum(stage.optimizer_bytes - stage.home_optimizer_bytes for stage in stages) - spare_states)
        + profile.optimizer_constant_bytes,
        activations=0,
        buffers=batch_bytes,
    )


def _copied_bytes(
    figures: Sequence[StageFigures],
    profile: ModelProfile,
    schedule: Schedule,
    rank: int,
    replicas: int | None,
    planned: Sequence[Reduction],
) -> int:
    """The bytes of what checkpoints in the background take from this rank, which is none for later twins."""
    if replicas is None:
        return 0
    stages = [stage for stage, holder in enumerate(schedule.placement[0]) if holder == rank]
    saved = [figures[stage] for stage in stages]
    residuals = sum(planned[stage].kept_bytes for stage in stages) if planned else 0  # each replica has its own
    return residuals + saved_copies(_states(saved, profile, 0), saved, profile, replicas)


def _spare_copies(weight: SharedWeight, stages: Sequence[StageFigures]) -> int:
    """How often the figures of these stages count a shared weight again, which is held only once."""
    uses = sum(stage.first <= layer <= stage.last for layer in weight.layers for stage in stages)
    return max(0, uses - 1)


def shared_states(
    sharing: ZeroSharing, stage: StageFigures, batch_bytes: int, *, accelerated: bool, replica: int | None = None
) -> HeldBytes:
    """The bytes that a rank holds beside activations under ZeRO.

    None stands for the replica that needs most.
    """
    held, more = sharing.held(stage), sharing.backward_extra(stage, replica)
    here = 0 if accelerated else held.host  # without a separate host, offloaded states stay in the same memory
    update = sharing.update_extra(stage) + (0 if accelerated else sharing.update_extra_host(stage))
    reduction = sharing.reduction_extra(stage, replica).device
    if sharing.stage == 2:  # it reduces within the backward, whose caller still holds the boundary tensors
        reduction += stage.input_bytes + stage.output_bytes + stage.input_gradient_bytes + stage.output_gradient_bytes
    end = max(update, reduction)
    step_bytes = max(0, end - more.device)
    states = MemoryParts(
        weights=held.weights + more.weights,
        gradients=held.gradients + more.gradients,
        optimizer=held.optimizer + here,
        activations=0,
        buffers=held.buffers + more.buffers + batch_bytes,
    )
    more = sharing.with_gradients(more)
    with_gradients = MemoryParts(more.weights, more.gradients, more.optimizer, 0, more.buffers)
    return HeldBytes(states, step_bytes, with_gradients)


def _with_divided_gradient(stage: StageFigures) -> StageFigures:
    """The figures under DeepSpeed, which copies the gradient of a stage's output, divided, as a backward begins."""
    if not stage.output_gradient_bytes:  # the last stage's is that of the loss
        return stage
    start = stage.backward_start_bytes + stage.output_gradient_bytes
    return replace(
        stage,
        backward_peak_bytes=max(stage.backward_peak_bytes, start),
        later_backward_peak_bytes=max(stage.later_backward_peak_bytes, start),
    )


def _padding(held: Sequence[StageFigures], profile: ModelProfile, replicas: int) -> int:
    """The bytes by which the weights of each stage, in one flat tensor, are padded to equal parts of whole elements."""
    trained = next((row for row in profile.layers if row.num_trained), None)
    width = trained.gradient_bytes // trained.num_trained if trained is not None else 1
    return sum(-one.gradient_bytes % (replicas * width) for one in held)


def _over_replicas(states: MemoryParts, needs: MemoryNeeds, replicas: int, padding: int) -> tuple[MemoryParts, int]:
    """Shard the optimizer's states over replicas; return the new parts and the bytes that a step makes and drops.

    A step makes the gradients and temporary tensors of its own part, and then the updated parts of all replicas.
    """
    padded = states.gradients + padding
    part = -(-padded // replicas)
    whole = round(needs.averages * states.gradients)
    own = -(-(states.optimizer - whole) * padded // max(states.gradients, 1))
    shared = replace(states, weights=states.weights + padding, optimizer=whole + -(-own // replicas))
    return shared, max((1 + needs.temporaries) * part, part * replicas)


def wide_gradients(stages: Sequence[StageFigures], profile: ModelProfile) -> int:
    """The bytes of master weights' fp32 gradients, which a step makes and drops for all stages of a rank together."""
    return round(profile.master_bytes_per_gradient_byte * sum(stage.gradient_bytes for stage in stages))


def temporary_bytes(figures: StageFigures, profile: ModelProfile, needs: MemoryNeeds) -> int:
    """The bytes that the norm and the update of a stage's weights make and drop, one weight after the other."""
    width = profile.master_bytes_per_gradient_byte or 1.0
    most = max((needs.temporaries * own + needs.lingering * before for own, before in figures.updates), default=0)
    most = max(most, (needs.temporaries + needs.lingering * needs.in_any_order) * figures.largest_parameter_bytes)
    most += needs.whole_temporaries * figures.elsewhere_bytes
    return round(width * max(most, needs.norm_copies * figures.largest_parameter_bytes))
