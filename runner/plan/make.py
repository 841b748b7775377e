"""Makes a frozen plan from a request and a profile; nothing here starts a process or allocates a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from runner.config.links import ranks_of_node
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import raise_problems
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.values import StageProgram
from runner.plan.activations import activation_notes, plans_arena
from runner.plan.cautions import Caution, approximations, lost_states
from runner.plan.collector import collector_paused
from runner.plan.cores import core_note
from runner.plan.devices import emulation_notes, with_speeds
from runner.plan.draft.draft import Draft, Machine, draft_of
from runner.plan.draft.memory import memory_of
from runner.plan.draft.stages import Stages
from runner.plan.host_notes import host_notes, idle_offload_notes
from runner.plan.later_cuts import with_later_cuts
from runner.plan.layout.empty_microbatches import empty_microbatch_notes
from runner.plan.layout.short_samples import short_sample_notes
from runner.plan.layout.topology import Topology
from runner.plan.memory.limits import on_accelerator
from runner.plan.memory.predict import in_flight_microbatches
from runner.plan.memory.stage_arena import arena_notes, stage_arena
from runner.plan.part_notes import part_notes
from runner.plan.reductions import reduction_notes, reductions, sent_bytes, with_compression
from runner.plan.requested_schedule import executed_schedule, follows_profile, is_chosen_by_plan
from runner.plan.rules.tables import order_problems, plan_problems
from runner.plan.search.advice import Comparison, compare_without_pipeline, misfit
from runner.plan.search.choose import choose, with_named_order
from runner.plan.search.improve import Improvement, best_override
from runner.plan.search.partition import best_cut
from runner.plan.split_notes import split_notes
from runner.plan.stages.figures import StageFigures
from runner.plan.time.network import slowest
from runner.plan.time.predict import Swap, predict_time, ring_all_reduce_seconds, stage_costs
from runner.plan.time.tensor import exchanged_bytes, gathered_bytes, update_bytes, with_boundaries
from runner.plan.time.weight_prediction import with_predictions
from runner.plan.time.zero import with_sharing
from runner.plan.uncertainty import expected_seconds, least_gain
from runner.plan.values import Link, RunPlan, TimePrediction
from runner.plan.varying_sizes import varying_size_notes
from runner.plan.work import work_of
from runner.profile import ModelProfile, Rehearsal
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Program, Schedule

__all__ = ["make_plan", "plan_problems"]

Rehearse = Callable[[RunConfig, Sequence[StageProgram], int], Sequence[Rehearsal]]
"""Rehearses programs of stages; see :func:`runner.memory.apply.rehearse.rehearse`."""

_REHEARSALS = 40  # plans with one more rehearsal of each stage; a policy has fewer programs


def make_plan(
    config: RunConfig,
    profile: ModelProfile,
    *,
    schedule: Schedule | None = None,
    link: Link | None = None,
    local_ranks: int | None = None,
    device_memory_bytes: int | None = None,
    cores: int | None = None,
    memory_bytes: int | None = None,
    profile_of: Callable[[RunConfig], ModelProfile] | None = None,
    rehearse: Rehearse | None = None,
    suggest: bool = False,
    compare: bool = True,
) -> RunPlan:
    """Make the plan of a request: check it, partition the model, and predict memory and time.

    Args:
        config: the request.
        profile: the profile of its model for any micro-batch size; it is converted to the step's largest micro-batch.
        schedule: a schedule to plan instead of the one that the request asks for, or leaves to the plan.
        link: the measured link; default: that of ``config.hardware``.
        local_ranks: number of ranks that share this machine's memory; default: those of a node.
        device_memory_bytes: memory of this machine's accelerator, if the run uses one.
        cores: cores of this machine that the ranks of a local run may use; default: as many as they need.
        memory_bytes: memory of the machine with the least; default: of this one.
        profile_of: makes the profile of a changed request; with it, advice may try other precisions and threads.
        rehearse: runs programs that decide in the run what they keep, on tensors without memory; without it and without
            a profile that knows them, what they take is a bound.
        suggest: whether the advice names the override that would shorten the step most; this plans dozens of requests.
        compare: whether it says what would make it fit, and whether a pipeline pays; this plans several requests.

    Returns:
        the plan; if it does not fit, ``fits`` is false and ``problems`` says why, and what would help.

    Raises:
        RequestError: the request has problems; the error contains all that :func:`plan_problems` finds.
    """
    with collector_paused():
        machine = Machine(link, local_ranks, device_memory_bytes, cores, memory_bytes)
        others = _Others(suggest=suggest, compare=compare)
        return _make(config, profile, machine, schedule, profile_of, rehearse, others)


class _Others(NamedTuple):
    """The other requests that are planned for comparison, see :func:`make_plan`."""

    suggest: bool
    compare: bool


def _make(
    config: RunConfig,
    profile: ModelProfile,
    machine: Machine,
    chosen: Schedule | None,
    profile_of: Callable[[RunConfig], ModelProfile] | None,
    rehearse: Rehearse | None,
    others: _Others,
) -> RunPlan:
    _refuse(config, profile)
    plan = _planned(config, profile, machine, chosen)
    if rehearse is not None:
        plan = _rehearsed(plan, config, rehearse, lambda known: _planned(config, known, machine, chosen))
        if plan.profile.samples == profile.samples:
            profile = replace(profile, rehearsals=plan.profile.rehearsals)
    plan = _with_arenas(plan, config)
    if not others.compare:
        return plan

    def replan(changed: RunConfig) -> RunPlan:
        _refuse(changed, profile)
        fresh = profile_of is not None and _profiled_as(changed) != _profiled_as(config)
        named = with_named_order(changed, plan.schedule)
        return _planned(named, profile_of(changed) if fresh and profile_of else profile, machine)

    problems = () if plan.fits else (misfit(plan, config, replan, other_precisions=profile_of is not None),)
    gain = least_gain(config, machine.cores, accelerated=_accelerated(config, machine))
    other = compare_without_pipeline(plan.time, config, replan, least_gain=gain)
    best: Improvement | None = None
    if others.suggest and plan.fits:
        times = profile_of is not None and config.hardware.name == "auto" and not _accelerated(config, machine)
        times = times and not profile.is_disturbed  # else two moments would be compared, not two numbers of threads
        best = best_override(plan, config, replan, measures_threads=times, least_gain=gain)
    reasons = (*((other.line, *other.lacks) if other is not None else ()), *plan.reasons)
    cautions = plan.cautions
    if not plan.fits:
        other = None  # a layout that does not fit pays nowhere
    if other is not None and other.pays is False:
        cautions = (Caution("pipeline", other.line), *cautions)
    advice = _ordered(plan.advice, best, other)
    return replace(plan, problems=problems, advice=advice, reasons=reasons, cautions=cautions)


def _rehearsed(
    plan: RunPlan, config: RunConfig, rehearse: Rehearse, again: Callable[[ModelProfile], RunPlan]
) -> RunPlan:
    """The plan with rehearsals of its programs that decide in the run.

    What is known of a program may make another one the fastest that fits, which is then rehearsed, too.
    """
    for _ in range(_REHEARSALS):
        profile = plan.profile
        names = {each.program for each in profile.rehearsals}
        stages = [each for cut in (plan, *(cut for _, cut in plan.cuts)) for each in cut.activations.stages]
        programs = [each for each in stages if isinstance(each, StageProgram) and each.wants_rehearsal]
        unknown = [each for each in programs if repr(each) not in names]
        found = rehearse(config, unknown, profile.samples) if unknown else ()
        if not found:
            break
        plan = again(replace(profile, rehearsals=(*profile.rehearsals, *found)))
    return plan


def _with_arenas(plan: RunPlan, config: RunConfig) -> RunPlan:
    """The plan with the arena of each stage, and a note about the largest, if its offload strategy plans arenas."""
    if not plans_arena(config):
        return plan
    costs = adjusted(plan.profile, plan.activations)
    arenas = tuple(
        stage_arena(costs, figures, count) for figures, count in zip(plan.figures, plan.in_flight, strict=True)
    )
    notes = arena_notes(f"offload.activations={config.offload.activations}", arenas)
    return replace(plan, arenas=arenas, advice=(*plan.advice, *notes))


def _ordered(notes: Sequence[str], best: Improvement | None, other: Comparison | None) -> tuple[str, ...]:
    """The plan's notes after the override that would help most; a layout without a pipeline goes before if it is it."""
    if best is None:
        return (*notes, *([other.line] if other is not None else []))
    if other is None:
        return (best.line, *notes)
    if other.pays is False and other.seconds is not None and other.seconds < best.seconds:
        return (other.line, f"of the layouts with a pipeline, {best.line}", *notes)
    return (best.line, *notes, other.line)


def _profiled_as(config: RunConfig) -> tuple[str, int]:
    """The settings that change a profile, of those that advice tries."""
    return config.precision.name, config.trainer.threads


def _accelerated(config: RunConfig, machine: Machine) -> bool:
    return on_accelerator(config, machine.device_memory_bytes)


def _refuse(config: RunConfig, profile: ModelProfile) -> None:
    names = [layer.name for layer in profile.layers]
    raise_problems(
        plan_problems(
            config,
            len(names),
            layer_names=names,
            statistics=_statistics(profile),
            odd_weights=profile.odd_weights,
            changed_buffers=profile.changed_buffers,
            shared_buffers=profile.shared_buffers,
            changed_states=profile.changed_states,
        )
    )


def _statistics(profile: ModelProfile) -> list[str]:
    return [layer.name for layer in profile.layers if layer.has_running_statistics]


def _planned(
    config: RunConfig,
    profile: ModelProfile,
    machine: Machine,
    chosen: Schedule | None = None,
) -> RunPlan:
    """The plan of a request without problems; chooses the schedule if that is left to the plan."""

    def assemble(schedule: Schedule) -> RunPlan:
        return _plan_of(draft_of(config, profile, machine, schedule))

    def assemble_checked(schedule: Schedule, note: Callable[[RunPlan], None]) -> RunPlan:
        seen = profile.odd_weights, profile.changed_buffers, profile.shared_buffers, profile.changed_states
        raise_problems(order_problems(config, schedule, len(profile.layers), _statistics(profile), *seen))
        return _plan_of(draft_of(config, profile, machine, schedule), note)

    if chosen is None and is_chosen_by_plan(config):
        plan = choose(config, assemble_checked)
    else:
        plan = assemble(executed_schedule(config) if chosen is None else chosen)
    return with_later_cuts(plan, config, lambda cut: _planned(cut, profile, machine, plan.schedule))


def _plan_of(draft: Draft, note: Callable[[RunPlan], None] = lambda plan: None) -> RunPlan:
    """The plan of a draft, without advice. Only one replica is planned, because the others are equal.

    Args:
        draft: a request, and what follows from it.
        note: called with the plan of every cut that is compared.
    """

    def assembled(draft: Draft, stages: Stages) -> RunPlan:
        plan = _assembled(draft, stages)
        note(plan)
        return plan

    if draft.devices:
        from runner.plan.search.by_device import best_of_devices  # with numpy, which other plans do not need

        return best_of_devices(draft, assembled)
    return best_cut(draft, partial(assembled, draft))


def _assembled(draft: Draft, stages: Stages) -> RunPlan:
    draft = (
        _ordered_by_profile(draft, stages.figures)
        if stages.schedule is None
        else replace(draft, schedule=stages.schedule)
    )
    schedule, layout = draft.schedule, draft.layout
    program, in_flight = lower(schedule), in_flight_microbatches(schedule)
    time = _time(draft, program, stages)
    cautions = tuple(_cautions(draft, time))
    return RunPlan(
        layout=layout.to_json(),
        topology=Topology.grid(
            layout.pipeline,
            layout.data,
            layout.tensor,
            placement=schedule.rows,
            pipeline_inside=draft.config.parallelism.order == "pipeline_inside",
        ),
        schedule=schedule,
        program=program,
        partition=stages.layers,
        profile=draft.profile,
        figures=stages.figures,
        in_flight=in_flight,
        activations=stages.activations,
        memory=memory_of(draft, program, stages.figures),
        time=time,
        memory_limit_bytes=draft.limit_bytes,
        host_limit_bytes=draft.host_limit_bytes,
        prediction=draft.prediction,
        advice=_with_cautions(cautions, _notes(draft, stages, in_flight, time)),
        cautions=cautions,
        work=work_of(draft.config, draft.profile),
        gradient_bytes_sent=sent_bytes(draft.config, draft.profile, stages.figures, schedule),
        tensor_bytes_sent=_tensor_bytes(draft, program, stages, schedule),
        host_activation_bytes=host_activation_bytes(draft, stages.figures),
        weights=stages.weights,
        turns=stages.turns,
        devices=draft.devices,
        device_limits=draft.limits if draft.devices else (),
    )


def _ordered_by_profile(draft: Draft, figures: Sequence[StageFigures]) -> Draft:
    """The draft; if the schedule's order follows the stages' seconds, with a new order from them."""
    if not follows_profile(draft.config):
        return draft
    copies = [draft.layout.data] * len(figures)
    costs = stage_costs(draft.profile, figures, mean_samples=draft.mean_samples, copies=copies, link=draft.link)
    costs = with_speeds(costs, draft.devices, draft.schedule.placement[0])
    return replace(draft, schedule=executed_schedule(draft.config, costs))


def _time(draft: Draft, program: Program, stages: Stages) -> TimePrediction:
    figures = stages.figures

    def adjusted(costs: StageCosts) -> StageCosts:
        ratio, rows = draft.mean_samples / draft.profile.samples, draft.schedule.rows
        costs = with_boundaries(costs, draft.config, draft.profile, figures, ratio, draft.network, rows)
        costs = _with_stashes(draft, costs, figures, ratio)
        costs = with_predictions(costs, draft.prediction, draft.schedule, draft.profile, figures)
        costs = _with_reductions(draft, costs, figures)
        return with_speeds(costs, draft.devices, draft.schedule.placement[0])

    time = predict_time(
        program,
        draft.profile,
        figures,
        mean_samples=draft.mean_samples,
        data=draft.layout.data,
        link=draft.link,
        host_link=draft.host_link,
        adjusted=adjusted,
        post_validation=draft.config.schedule.post_validation,
        at_once=draft.shared.at_once(draft.layout.data * draft.layout.tensor) if draft.shared is not None else None,
        swap=Swap(stages.weights, stages.turns),
    )
    accelerated = draft.needs.accelerated
    gain = least_gain(draft.config, draft.cores, accelerated=accelerated)
    actions = max(map(len, draft.schedule.actions))
    return replace(
        time,
        expected=expected_seconds(time.step_seconds, draft.profile, gain, actions=actions, accelerated=accelerated),
    )


def _with_stashes(draft: Draft, costs: StageCosts, figures: Sequence[StageFigures], ratio: float) -> StageCosts:
    """The costs with what other ranks keep for a time over the links to these ranks."""
    schedule, layout = draft.schedule, draft.layout
    seconds = list(costs.stash)
    kept = dict.fromkeys((each.stage, each.peer) for each in schedule.moves if each.peer is not None)
    for stage, peer in kept:
        link = draft.network.between(schedule.placement[0][stage], peer, layout.data, layout.tensor)
        seconds[stage] = link.seconds((figures[stage].saved_bytes + figures[stage].input_bytes) * ratio)
    return replace(costs, stash=seconds)


def _with_reductions(draft: Draft, costs: StageCosts, figures: Sequence[StageFigures]) -> StageCosts:
    """The costs with sums over the links of replicas, and with what ZeRO or the request's compressor sends instead."""
    layout, schedule, network = draft.layout, draft.schedule, draft.network
    places = [[schedule.rows[row][stage] for row in schedule.copies_of(stage)] for stage in range(schedule.stages)]
    links = [network.replicas(each, layout.data, layout.tensor) for each in places]
    if any(each != draft.link for each in links):
        sums = zip(figures, places, links, strict=True)
        costs = replace(
            costs,
            reduce=[
                ring_all_reduce_seconds(stage.gradient_bytes, layout.data * len(ranks), link)
                for stage, ranks, link in sums
            ],
        )
    ring = slowest(links)
    if draft.config.compression.name == "none":
        return with_sharing(draft.config, costs, draft.profile, figures, ring)
    planned = reductions(draft.config, draft.profile, figures, schedule)
    return with_compression(costs, planned, layout.data, ring)


def _notes(draft: Draft, stages: Stages, in_flight: Sequence[int], time: TimePrediction) -> tuple[str, ...]:
    """Notes for a reader of the plan about its figures."""
    kept = activation_notes(
        draft.config, draft.profile, stages.activations, in_flight, on_accelerator=draft.needs.accelerated
    )
    return (
        *stages.notes,
        *empty_microbatch_notes(draft.config),
        *short_sample_notes(draft.config, draft.profile),
        *varying_size_notes(draft.profile),
        *part_notes(draft.profile, draft.layout.tensor, ranks_of_node(draft.config.hardware), draft.network),
        *kept,
        *reduction_notes(draft.config),
        *host_notes(draft, stages, time, host_activation_bytes(draft, stages.figures)),
        *_move_notes(draft.schedule, stages.figures),
        *split_notes(draft.schedule, adjusted(draft.profile, stages.activations), stages.layers),
        *_link_notes(draft),
    )


def _cautions(draft: Draft, time: TimePrediction) -> Iterator[Caution]:
    yield from (Caution("learning", line) for line in approximations(draft.config, draft.schedule))
    yield from (Caution("checkpoints", line) for line in lost_states(draft.profile))
    if draft.shared is not None:
        yield Caution("cores", core_note(draft.shared, time))
    emulated = emulation_notes(draft.devices, accelerated=draft.needs.accelerated)
    yield from (Caution("devices", line) for line in emulated)
    yield from (Caution("host", line) for line in idle_offload_notes(draft))


def _with_cautions(cautions: Sequence[Caution], notes: Sequence[str]) -> tuple[str, ...]:
    """The notes of a plan: first what it learns otherwise, and after its figures what slows it down."""
    first = (each.line for each in cautions if each.about == "learning")
    return (*first, *notes, *(each.line for each in cautions if each.about != "learning"))


def _link_notes(draft: Draft) -> tuple[str, ...]:
    if draft.link.bytes_per_second is not None or draft.layout.world_size == 1:
        return ()
    return ("the link's speed is not known, messages count as free: set hardware.link_bytes_per_second",)


def _tensor_bytes(draft: Draft, program: Program, stages: Stages, schedule: Schedule) -> float | None:
    """The bytes of a step that ranks exchange as they divide layers; None, because not counted, if layers run twice."""
    ranks = draft.layout.tensor
    if ranks == 1:
        return 0.0
    if not all(
        isinstance(each, tuple) and not any(part.recompute for part in each) for each in stages.activations.stages
    ):
        return None
    steps = draft.config.data.batch_size / draft.profile.samples
    updates = draft.layout.data * len(schedule.rows) * update_bytes(draft.config, draft.profile, ranks)
    scale = draft.layout.data * draft.mean_samples / draft.profile.samples
    boundaries = gathered_bytes(draft.config, draft.profile, program, stages.figures) * scale
    return ranks * (exchanged_bytes(draft.profile, ranks) * steps + updates + boundaries)


def host_activation_bytes(draft: Draft, figures: Sequence[StageFigures]) -> float:
    """Bytes of activations that all ranks move to their hosts' memory in a step; as many come back."""
    steps = draft.layout.tensor * draft.config.data.batch_size / draft.profile.samples
    return sum(stage.moved_bytes for stage in figures) * steps


def _move_notes(schedule: Schedule, figures: Sequence[StageFigures]) -> tuple[str, ...]:
    """A note about the traffic of activations that other ranks keep for a time."""
    if not schedule.moves:
        return ()
    moved = sum(figures[move.stage].saved_bytes + figures[move.stage].input_bytes for move in schedule.moves)
    pairs = dict.fromkeys((schedule.placement[0][move.stage], move.peer) for move in schedule.moves)
    told = ", ".join(f"{lender} and {host}" for lender, host in pairs)
    return (
        f"{schedule.name} sends {format_bytes(2 * moved)} of activations a step between ranks {told}, of "
        f"{len(schedule.moves)} micro-batches there and back; a sender waits until they have left",
    )
