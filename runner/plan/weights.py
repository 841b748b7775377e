"""Plans which weights are at home in the host's memory: the units of every stage, their turns, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace

from runner.config.guests import weights_of
from runner.config.precision import weight_widths
from runner.config.schema import OffloadConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.memory.solve.offload import chain_program
from runner.memory.solve.residency import RankTurns, Run, WeightUnit, rank_turns, stage_runs
from runner.memory.solve.values import ActivationPlan, Program
from runner.memory.solve.weight_strategy import StageUnits, WeightOptions, WeightPlan
from runner.plan.stages.figures import state_bytes
from runner.profile import LayerProfile, ModelProfile
from runner.schedule.values import Op, Schedule

__all__ = ["RankPeaks", "plan_weights", "turns_of_ranks", "weight_options", "with_units"]

RankPeaks = Callable[[ModelProfile], Sequence[int]]
"""The predicted peak of each rank if the stages have the costs of a profile."""

_ATTEMPTS = 6  # of a strategy that moves as little as the limit asks for


def weight_options(config: OffloadConfig) -> WeightOptions:
    """The options of a request that strategies read."""
    return WeightOptions(config.blocks, config.fraction, config.frozen_only)


def plan_weights(
    config: RunConfig,
    profile: ModelProfile,
    activations: ActivationPlan,
    costs: ModelProfile,
    schedule: Schedule,
    *,
    limit_bytes: int,
    peaks: RankPeaks,
    copy_seconds: Callable[[float], float],
) -> tuple[WeightPlan, ModelProfile]:
    """The units of each stage, and the profile with what they cost.

    Args:
        config: the request.
        profile: the model's profile.
        activations: what is kept of each stage.
        costs: the profile with the costs of that.
        schedule: the schedule of one replica.
        limit_bytes: the memory limit of a rank.
        peaks: predicts memory, for a strategy that reads it.
        copy_seconds: see :class:`runner.memory.solve.values.StageChain`.
    """
    strategy = weights_of(config.offload)
    if strategy is None:
        return WeightPlan(), costs
    options = weight_options(config.offload)
    units = [_units(config, profile, program) for program in activations.stages]
    if not any(units):
        if config.offload.scope == "all":  # activations may be enough
            return WeightPlan(), costs
        raise RequestError([_nothing_to_move(config)])
    excess: list[int | None] = [None] * len(units)
    by_budget = strategy.reads_budget and options.fraction is None

    def chosen() -> WeightPlan:
        stages = (_stage(own, over, options, profile, copy_seconds) for own, over in zip(units, excess, strict=True))
        return WeightPlan(tuple(tuple(strategy.choose(stage)) for stage in stages), options.frozen_only)

    planned = chosen()
    made = with_units(costs, planned, turns_of_ranks(planned, activations, schedule, profile), profile)
    for _ in range(_ATTEMPTS if by_budget else 0):
        over = [max(0, peak - limit_bytes) for peak in peaks(made)]
        if not any(over):
            break
        for rank, more in enumerate(over):
            own = schedule.stages_of(rank)
            for stage in own if more else ():
                excess[stage] = (excess[stage] or 0) + -(-more // len(own))
        planned = chosen()
        made = with_units(costs, planned, turns_of_ranks(planned, activations, schedule, profile), profile)
    return planned, made


def _stage(
    units: Sequence[WeightUnit],
    excess: int | None,
    options: WeightOptions,
    profile: ModelProfile,
    copy_seconds: Callable[[float], float],
) -> StageUnits:
    layers = [profile.layers[unit.first : unit.last + 1] for unit in units]
    forward = [sum(layer.forward_seconds for layer in own) for own in layers]
    backward = [sum(layer.backward_seconds for layer in own) for own in layers]
    copying = [copy_seconds(unit.weight_bytes) for unit in units]
    return StageUnits(units, excess, options, forward, backward, copying)


def turns_of_ranks(
    plan: WeightPlan,
    activations: ActivationPlan,
    schedule: Schedule,
    profile: ModelProfile,
    microbatches: Container[int] | None = None,
) -> tuple[RankTurns, ...]:
    """The turns of every rank in a window of ``schedule``; empty if no weights move.

    Args:
        plan: the units of each stage.
        activations: what is kept of each stage, which says in which order its backward runs layers.
        schedule: the schedule of training windows, or one without backwards.
        profile: tells which layers are trained.
        microbatches: the numbers of the micro-batches that have samples; only they are computed. None = all have some.
    """
    if not any(plan.stages):
        return ()
    trained = (at for at, layer in enumerate(profile.layers) if layer.gradient_bytes)
    first_trained = next(trained, len(profile.layers))
    layers = [stage_runs(program, first_trained) for program in activations.stages]
    return tuple(
        rank_turns(
            [
                Run(
                    action.op is not Op.F,
                    action.stage,
                    action.microbatch or 0,
                    layers[action.stage][action.op is not Op.F],
                )
                for action in schedule.actions[rank]
                if action.op in (Op.F, Op.B) and (microbatches is None or action.microbatch in microbatches)
            ],
            plan.of(schedule.stages_of(rank)),
        )
        for rank in range(schedule.ranks)
    )


def with_units(
    profile: ModelProfile, plan: WeightPlan, turns: Sequence[RankTurns], plain: ModelProfile
) -> ModelProfile:
    """The profile of which units are at home in the host: layers need room for those that are on the device.

    Args:
        profile: the model's profile with the costs of what is kept.
        plan: the units of each stage.
        turns: when they are on the device.
        plain: the profile without those costs.
    """
    if not turns:
        return profile
    first = _with_turns(profile, plan, [each.of_first_backwards() for each in turns], plain)
    return replace(_with_turns(profile, plan, turns, plain), first_backwards=first)


def _with_turns(
    profile: ModelProfile, plan: WeightPlan, turns: Sequence[RankTurns], plain: ModelProfile
) -> ModelProfile:
    forward, backward, chained, of_loss, asked, fetched = (dict[int, int]() for _ in range(6))
    spared, spared_chained = _spared(plain)
    last = len(plain.layers) - 1
    moving = {at for at, row in enumerate(profile.layers) if row.moved_bytes}
    gradients = {at: _own_gradients(plain, at) for at in range(len(plain.layers))}
    for each in turns:
        forward |= each.largest_bytes(backward=False)
        fetched |= each.largest_bytes(backward=True)
        backward |= each.largest_bytes(backward=True, spared=spared)
        chained |= each.largest_bytes(backward=True, spared=spared_chained)
        of_loss |= each.largest_bytes(backward=True, spared={last: gradients[last]})
        asked |= each.turning(moving).largest_bytes(backward=True, spared=gradients)
    home = {unit.first: unit for units in plan.stages for unit in units}
    rows = [
        _asking(_row(row, forward.get(at, 0), backward.get(at, 0), chained.get(at, 0), home.get(at)), asked.get(at, 0))
        for at, row in enumerate(profile.layers)
    ]
    rows = [replace(row, fetched_bytes=fetched.get(at, 0)) for at, row in enumerate(rows)]
    loss = _row(profile.loss, forward.get(last, 0), of_loss.get(last, 0), of_loss.get(last, 0), None)
    return replace(profile, layers=tuple(rows), loss=loss)


def _own_gradients(profile: ModelProfile, at: int) -> int:
    """The bytes of the gradients of a layer's weights that no other layer uses."""
    shared = sum(each.gradient_bytes for each in profile.shared if at in each.layers)
    return profile.layers[at].gradient_bytes - shared


def _spared(profile: ModelProfile) -> tuple[dict[int, int], dict[int, int]]:
    """For each layer, the gradients that are not there yet at the peak of its first backward: alone, and chained."""
    alone, chained = dict[int, int](), dict[int, int]()
    for at, row in enumerate(profile.layers):
        own = _own_gradients(profile, at)
        if row.gradient_peaks is not None:
            alone[at] = min(own, max(0, row.backward_transient_bytes - row.gradient_peaks.adding))
            chained[at] = min(own, max(0, row.inner_backward_bytes - row.gradient_peaks.chained_adding))
    return alone, chained


def _row(row: LayerProfile, forward: int, backward: int, chained: int, unit: WeightUnit | None) -> LayerProfile:
    split, unsaved = row.split, row.unsaved_forward_bytes
    made = replace(
        row.with_backward(row.backward_transient_bytes + backward, row.inner_backward_bytes + chained),
        forward_transient_bytes=row.forward_transient_bytes + forward,
        unsaved_forward_bytes=None if unsaved is None else unsaved + forward,
        split=None if split is None else split.with_more(backward),
    )
    if unit is None:
        return made
    return replace(
        made,
        home_weight_bytes=unit.weight_bytes,
        home_gradient_bytes=unit.gradient_bytes,
        home_optimizer_bytes=unit.optimizer_bytes,
    )


def _asking(row: LayerProfile, num_bytes: int) -> LayerProfile:
    """The row with weights that are there when its backward asks for what was moved, which may not have left yet."""
    if not num_bytes:
        return row
    return replace(row, moves=replace(row.moves, asking_bytes=row.moves.asking_bytes + num_bytes))


def _nothing_to_move(config: RunConfig) -> Problem:
    why = "Weights with several names stay on the device, and the model has no others"
    fix = "offload=none"
    if config.offload.frozen_only:
        why, fix = "Nothing is frozen", "offload.frozen_only=false, or trainer.freeze=[PATTERN]"
    return Problem("offload.weights", config.offload.weights, "needs weights that can move", why, fix)


def _units(config: RunConfig, profile: ModelProfile, program: Program) -> list[WeightUnit]:
    """The parts of a stage whose weights can move: segments that are computed again, and other layers one by one."""
    found = []
    for segment in chain_program(program):
        layers = range(segment.first, segment.last + 1)
        for first, last in [(layers[0], layers[-1])] if segment.recompute else [(at, at) for at in layers]:
            unit = _unit(config, profile, first, last)
            if unit.weight_bytes:
                found.append(unit)
    return found


def _unit(config: RunConfig, profile: ModelProfile, first: int, last: int) -> WeightUnit:
    width, ratio = weight_widths(config)[0], profile.optimizer_bytes_per_gradient_byte
    weights = gradients = 0
    states = 0.0
    for at in range(first, last + 1):
        layer, shared = profile.layers[at], [each for each in profile.shared if at in each.layers]
        weights += width * (layer.num_parameters - sum(each.num_parameters for each in shared))
        gradients += layer.gradient_bytes - sum(each.gradient_bytes for each in shared)
        states += state_bytes(layer, ratio) - sum(state_bytes(each, ratio) for each in shared)
    if config.offload.frozen_only:
        return WeightUnit(first, last, weights - gradients)
    return WeightUnit(first, last, weights, gradients, round(states))
