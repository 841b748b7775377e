"""Seconds of an optimizer step, by playing the schedule on the stages' seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.plan.stages.figures import StageFigures
from runner.plan.values import Link, StageSeconds, TimePrediction
from runner.profile import ModelProfile
from runner.schedule.simulation.clock import Simulation, StageCosts, simulate
from runner.schedule.simulation.opportunistic import realised
from runner.schedule.stream import period
from runner.schedule.values import Op, Schedule

__all__ = ["predict_time", "ring_all_reduce_seconds", "stage_costs"]


def predict_time(
    schedule: Schedule,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
    *,
    mean_samples: float,
    data: int = 1,
    link: Link | None = None,
    stage_seconds: StageSeconds | None = None,
    post_validation: bool = False,
    adjusted: Callable[[StageCosts], StageCosts] | None = None,
) -> TimePrediction:
    """One optimizer step of one replica's pipeline; replicas run alike.

    Args:
        schedule: one replica's.
        profile: any micro-batch's; its seconds count in proportion to the samples.
        figures: of each stage, from the same profile.
        mean_samples: mean samples of the step's micro-batches.
        data: replicas that reduce gradients, besides the twins of several pipelines.
        link: between neighbouring ranks; none = messages and reductions cost nothing.
        stage_seconds: whole stages measured in place; they win over the profile's layers.
        post_validation: a step begins while others end the one before; predicted is one of many.
        adjusted: what else is known of the costs that layers and link make.
    """
    copies = [data * len(schedule.copies_of(stage)) for stage in range(schedule.stages)]
    costs = stage_costs(profile, figures, mean_samples=mean_samples, copies=copies, link=link or Link())
    if adjusted is not None:
        costs = adjusted(costs)
    if stage_seconds is not None:
        costs = _measured(costs, stage_seconds, len(figures))
    schedule = realised(schedule, costs)
    played = simulate(schedule, costs)
    source = "measured" if stage_seconds is not None else profile.seconds_source
    if post_validation:
        seconds = period(schedule, costs)
        bubble = 1.0 - sum(played.busy) / (schedule.ranks * seconds)
        return TimePrediction(seconds + _longest_update(schedule, costs), bubble, played.busy, source, costs)
    steps = schedule.windows
    finish = max(_finish(schedule, played, costs)) + (steps - 1) * _longest_update(schedule, costs)
    busy = tuple(each / steps for each in played.busy)
    curvature = tuple(each / steps for each in played.curvature) if schedule.has_curvature else ()
    return TimePrediction(finish / steps, played.bubble_ratio, busy, source, costs, curvature)


def _longest_update(schedule: Schedule, costs: StageCosts) -> float:
    """Of a rank whose compute leaves no gap, reductions beside it included only where they last longer."""
    return max(sum(costs.step[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.ranks))


def stage_costs(
    profile: ModelProfile, figures: Sequence[StageFigures], *, mean_samples: float, copies: Sequence[int], link: Link
) -> StageCosts:
    """The simulator's costs, in seconds. A recompute costs an F.

    Args:
        profile, figures, mean_samples, link: see :func:`predict_time`.
        copies: of each stage: ranks that reduce its gradients.
    """
    ratio = mean_samples / profile.samples
    return StageCosts(
        F=[stage.forward_seconds * ratio for stage in figures],
        B=[stage.backward_seconds * ratio for stage in figures],
        I=[stage.input_gradient_seconds * ratio for stage in figures],
        W=[stage.weight_gradient_seconds * ratio for stage in figures],
        comm=[link.seconds(stage.output_bytes * ratio) for stage in figures[:-1]],
        reduce=[
            ring_all_reduce_seconds(stage.gradient_bytes, ranks, link)
            for stage, ranks in zip(figures, copies, strict=True)
        ],
        step=[stage.gradient_bytes * profile.optimizer_seconds_per_byte for stage in figures],
        curvature=_of_both([stage.curvature.sum_seconds for stage in figures], ratio),
        inversion=_of_both([stage.curvature.inversion_seconds for stage in figures]),
    )


def _of_both(seconds: Sequence[tuple[float, float]], ratio: float = 1.0) -> tuple[list[float], list[float]]:
    """By stage, of K-FAC's factors of inputs, and of output gradients."""
    return [inputs * ratio for inputs, _ in seconds], [outputs * ratio for _, outputs in seconds]


def ring_all_reduce_seconds(num_bytes: int, copies: int, link: Link) -> float:
    """A ring over ``copies`` ranks: 2 (R - 1) messages of 1/R of the bytes."""
    return 2 * (copies - 1) * link.seconds(num_bytes / copies)


def _measured(costs: StageCosts, seconds: StageSeconds, stages: int) -> StageCosts:
    return StageCosts(
        F=seconds.forward,
        B=seconds.backward,
        I=seconds.input_gradient or [each / 2 for each in seconds.backward],
        W=seconds.weight_gradient or [each / 2 for each in seconds.backward],
        comm=(seconds.message,) * (stages - 1),
        reduce=seconds.reduce or costs.reduce,
        step=seconds.step,
        curvature=costs.curvature,
        inversion=costs.inversion,
    )


def _finish(schedule: Schedule, played: Simulation, costs: StageCosts) -> list[float]:
    """When each rank's optimizer step has ended.

    What comes after the compute is the same on every rank: each stage's gradients are reduced once the last
    backward of each of its copies has ended, one stage after the other beside the compute, then all its stages step.
    So it is added here, which plays a third of the actions of the lowered program, to the same times.
    """
    last: dict[int, float] = {}  # by stage, over all ranks that hold it
    for actions, ends in zip(schedule.actions, played.end, strict=True):
        for action, end in zip(actions, ends, strict=True):
            if action.op in (Op.B, Op.W):
                last[action.stage] = max(last.get(action.stage, 0.0), end)
    finish = []
    for rank in range(schedule.ranks):
        moment = 0.0
        for stage in sorted(schedule.stages_of(rank), key=lambda stage: last[stage]):
            moment = max(moment, last[stage]) + (costs.reduce[stage] if costs.reduce else 0.0)
        if schedule.has_curvature:
            moment = max(moment, played.end[rank][-1])  # K-FAC's work at the end, whose inverses the step uses
        finish.append(moment + sum(costs.step[stage] for stage in schedule.stages_of(rank)))
    return finish
