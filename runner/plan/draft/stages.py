"""The stages of a draft: their layers by one policy, and what the activation policies keep of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from runner.errors import Problem, raise_problems
from runner.memory.solve.adjust import adjusted
from runner.memory.solve.residency import RankTurns
from runner.memory.solve.values import ActivationPlan, Segment
from runner.memory.solve.weight_strategy import WeightPlan
from runner.plan.activations import (
    has_peers,
    lends,
    plan_activations,
    program_problems,
    reads_budget,
    shares_by_lifetime,
)
from runner.plan.budgets import EqualShares, SharesByLifetime
from runner.plan.choices import ProgramChoice
from runner.plan.cut.partition import NothingFitsError, Partition, partition
from runner.plan.draft.draft import Draft
from runner.plan.draft.loans import with_lenders_whole, with_room_lent
from runner.plan.draft.memory import memory_of
from runner.plan.in_place import in_place_problems
from runner.plan.memory.predict import in_flight_microbatches
from runner.plan.memory.rank_limit import RankMemory
from runner.plan.memory.stage_limit import StageMemoryLimit
from runner.plan.stages.figures import StageFigures, stage_figures
from runner.plan.weights import plan_weights, turns_of_ranks
from runner.profile import ModelProfile
from runner.schedule.generators.replicated import replicas_of
from runner.schedule.liveness import Kind
from runner.schedule.lowering.program import lower
from runner.schedule.values import Op, Schedule
from runner.schedule.values import Program as LoweredProgram

__all__ = ["Stages", "choice_of", "cut", "rough_profile", "stage_memory", "stages_of"]

_BY_MEMORY = ("profile", "memory")  # policies that read what ranks need
_ATTEMPTS = 4  # plans of a policy that reads budgets; the first is right unless ranks hold more beside its tensors


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a draft.

    Args:
        layers: first and last layer of each stage.
        activations: what the policies keep of each stage.
        figures: the figures of each stage, including the costs of the policies.
        notes: notes about the partition for the reader of the plan.
        weights: which weights are at home in the host's memory.
        turns: for each rank, when they are on the device; empty if none are at home there.
        schedule: the draft's schedule with loans, if ranks may lend activations; None: as it is.
    """

    layers: Partition
    activations: ActivationPlan
    figures: tuple[StageFigures, ...]
    notes: tuple[str, ...]
    weights: WeightPlan = WeightPlan()
    turns: tuple[RankTurns, ...] = ()
    schedule: Schedule | None = None


def cut(
    draft: Draft, policy: str, *, as_fast_as: Partition | None = None, choose: ProgramChoice | None = None
) -> Stages:
    """Choose the stages' layers by a policy, and plan what is kept of them.

    The search for a partition uses a plan for all layers as one stage; then the activation policies plan the stages
    that it found.

    Args:
        draft: the request and what follows from it.
        policy: a name of :func:`runner.plan.cut.partition.partition`.
        as_fast_as: see there.
        choose: see :func:`stages_of`.

    Raises:
        RequestError: these stages cannot be trained so.
    """
    return stages_of(draft, *_partition(draft, rough_profile(draft), policy, as_fast_as), choose=choose)


def rough_profile(draft: Draft) -> ModelProfile:
    """The profile with what the activation policies keep if all layers are one stage."""
    whole = (0, len(draft.profile.layers) - 1)
    return plan_activations(draft.config, draft.profile, [whole], on_accelerator=draft.needs.accelerated)[1]


def choice_of(draft: Draft) -> ProgramChoice:
    """What chooses the programs of a draft's stages; it prices those of the same layers once."""
    return ProgramChoice(to_host=_moves_to_host(draft))


def stages_of(
    draft: Draft, layers: Partition, notes: tuple[str, ...] = (), choose: ProgramChoice | None = None
) -> Stages:
    """The stages with given layers, and what the policies keep of them.

    Args:
        draft: the request and what follows from it.
        layers: first and last layer of each stage.
        notes: notes about the partition.
        choose: see :func:`choice_of`; None: one for these stages alone.

    Raises:
        RequestError: these stages cannot be trained so.
    """
    raise_problems([*_crossing_weights(draft, layers), *_frozen_stages(draft, layers)])

    made = _stages_of(draft, layers, notes, choose)
    if draft.config.offload.scope != "all" or not made.turns:
        return made
    weights_alone = _stages_of(_with_activations_kept(draft), layers, notes, None)
    fitting = (each for each in (made, weights_alone) if max(_peaks(draft, each.figures)) <= draft.limit_bytes)
    return min(fitting, key=lambda each: _bytes_moved(draft, each), default=made)


def _with_activations_kept(draft: Draft) -> Draft:
    config = draft.config
    return replace(draft, config=replace(config, offload=replace(config.offload, activations="none")))


def _peaks(draft: Draft, figures: Sequence[StageFigures]) -> Sequence[int]:
    return memory_of(draft, lower(draft.schedule), figures).peak_bytes


def _bytes_moved(draft: Draft, stages: Stages) -> int:
    """What a step moves to the host's memory and back, of activations and of weights."""
    forwards = (action.stage for row in draft.schedule.actions for action in row if action.op is Op.F)
    activations = 2 * sum(stages.figures[stage].moved_bytes for stage in forwards)
    return activations + sum(sum(rank.traffic) for rank in stages.turns)


def _stages_of(draft: Draft, layers: Partition, notes: tuple[str, ...], choose: ProgramChoice | None) -> Stages:
    activations, costs = _planned_activations(draft, layers, choose or choice_of(draft))
    if has_peers(draft.config) and draft.schedule.moves:
        activations = with_lenders_whole(activations, layers, draft.schedule)
        costs = adjusted(draft.profile, activations)
    raise_problems(program_problems(draft.config, activations))
    raise_problems(list(in_place_problems(draft.config, draft.profile, activations)))
    weights, costs = _planned_weights(draft, layers, activations, costs)
    turns = turns_of_ranks(weights, activations, draft.schedule, draft.profile)
    figures = stage_figures(costs, layers)
    schedule = with_room_lent(draft, figures) if lends(draft.config) else None
    return Stages(layers, activations, figures, notes, weights, turns, schedule)


def _planned_weights(
    draft: Draft, layers: Partition, activations: ActivationPlan, costs: ModelProfile
) -> tuple[WeightPlan, ModelProfile]:
    def peaks(made: ModelProfile) -> Sequence[int]:
        return _peaks(draft, stage_figures(made, layers))

    return plan_weights(
        draft.config,
        draft.profile,
        activations,
        costs,
        draft.schedule,
        limit_bytes=draft.limit_bytes,
        peaks=peaks,
        copy_seconds=draft.host_link.seconds,
    )


def _planned_activations(draft: Draft, layers: Partition, choose: ProgramChoice) -> tuple[ActivationPlan, ModelProfile]:
    """What the policies keep of each stage, and the profile with their costs.

    A policy that reads budgets plans again with less, as long as a rank needs more than its limit.
    """
    program, profile = lower(draft.schedule), draft.profile
    plan = partial(
        plan_activations,
        draft.config,
        profile,
        layers,
        on_accelerator=draft.needs.accelerated,
        in_flight=in_flight_microbatches(draft.schedule),
        between=in_flight_microbatches(draft.schedule, (Kind.SAVED,)),
        choose=choose,
        copy_seconds=draft.host_link.seconds,
    )
    if not reads_budget(draft.config):
        return plan()
    everything = ActivationPlan(tuple((Segment(first, last),) for first, last in layers))
    figures = stage_figures(adjusted(profile, everything), layers)
    shares = (SharesByLifetime if shares_by_lifetime(draft.config) else EqualShares)(
        draft.limits, draft.schedule, memory_of(draft, program, figures), figures
    )
    budgets = shares.first()
    for _ in range(_ATTEMPTS):
        planned = plan(budgets=budgets)
        needed = memory_of(draft, program, stage_figures(planned[1], layers))
        less = shares.lowered(budgets, needed, planned[0].choices)
        if less is None or less == budgets:
            break
        budgets = less
    if any(action.op is Op.I for row in draft.schedule.actions for action in row):
        return _fastest_by_rank(draft, layers, planned[0], program)
    return planned


def _fastest_by_rank(
    draft: Draft, layers: Partition, planned: ActivationPlan, program: LoweredProgram
) -> tuple[ActivationPlan, ModelProfile]:
    """The plan in which each stage has the fastest of its programs with which its rank keeps to its limit.

    What a stage needs by itself is a bound where backwards are in two parts. So programs that it excludes may fit, and
    of two budgets the lower one may give a program that needs more. The walk of the rank is exact.

    Args:
        draft: the request and what follows from it; its schedule has divided backwards.
        layers: first and last layer of each stage.
        planned: a plan by that bound.
        program: the lowered schedule.
    """
    best, costs = planned, adjusted(draft.profile, planned)
    for stage, choice in enumerate(planned.choices):
        ranks = [rank for rank in range(draft.schedule.ranks) if stage in draft.schedule.stages_of(rank)]
        for offer, of_stage in zip(choice.offers, choice.programs, strict=True):
            if offer == best.choices[stage].chosen:
                break
            tried = best.with_choice(stage, of_stage, offer)
            made = adjusted(draft.profile, tried)
            peaks = memory_of(draft, program, stage_figures(made, layers)).peak_bytes
            if all(peaks[rank] <= draft.limits[rank] for rank in ranks):
                best, costs = tried, made
                break
    return best, costs


def _moves_to_host(draft: Draft) -> bool:
    return draft.needs.accelerated and draft.config.offload.activations == "save_on_cpu"


def _crossing_weights(draft: Draft, layers: Partition) -> list[Problem]:
    """Problems of trained weights that several stages share, if stages or pipelines are updated separately."""
    if not (draft.schedule.is_asynchronous or draft.schedule.own_weights):
        return []
    for weight in draft.profile.shared:
        users = {
            stage for stage, (first, last) in enumerate(layers) if any(first <= one <= last for one in weight.layers)
        }
        if weight.gradient_bytes and len(users) > 1:
            rule = f"must be synchronous where stages share a weight (layers {', '.join(map(str, weight.layers))})"
            why = "Its copies would be updated at different moments, from gradients of different steps"
            if draft.schedule.own_weights:
                why = "Each pipeline trains its own copy in every stage, and the stages would have to sum each of them"
            return [Problem("schedule.name", draft.schedule.name, rule, why, "schedule=1f1b")]
    return []


def _frozen_stages(draft: Draft, layers: Partition) -> list[Problem]:
    """A problem if DeepSpeed would have to make an optimizer of a stage without a trained weight."""
    if draft.needs.sharing is None or not draft.config.zero.stage:
        return []
    rows = draft.profile.layers
    for stage, (first, last) in enumerate(layers):
        if not any(row.gradient_bytes for row in rows[first : last + 1]):
            rule = f"must be 0 where a stage trains nothing (stage {stage}, layers {first}..{last})"
            why = "DeepSpeed makes no optimizer without weights"
            return [Problem("zero.stage", draft.config.zero.stage, rule, why, "zero.stage=0, or trainer.freeze=[]")]
    return []


def _partition(
    draft: Draft, profile: ModelProfile, policy: str, as_fast_as: Partition | None
) -> tuple[Partition, tuple[str, ...]]:
    """The stages' layers. If no partition fits, it is the one balanced by time, with a note that says so."""
    schedule = draft.schedule
    stages, placement = schedule.stages, schedule.placement[0]
    limit, ranks = stage_memory(draft, profile), None
    if policy in _BY_MEMORY and any(len(schedule.stages_of(rank)) > 1 for rank in range(schedule.ranks)):
        ranks = RankMemory(limit, schedule, draft.limits)
    try:
        layers = partition(
            policy,
            profile,
            stages,
            boundaries=draft.config.partition.boundaries,
            limit=limit,
            placement=placement,
            ranks=ranks,
            as_fast_as=as_fast_as,
            replicas=replicas_of(schedule),
        )
    except NothingFitsError as error:
        layers = partition(policy, profile, stages, placement=placement, replicas=replicas_of(schedule))
        return layers, (f"{error.problems[0].rule}; shown is the one balanced by time alone",)
    return layers, ()


def stage_memory(draft: Draft, profile: ModelProfile) -> StageMemoryLimit:
    """What single stages need, and their limits."""
    return StageMemoryLimit.of(profile, draft.schedule, draft.limits, draft.needs)
