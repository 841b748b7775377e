"""Plays a lowered program with known costs for the seconds of an optimizer step; no model and no request is read."""

from __future__ import annotations

from dataclasses import replace

from runner.plan.values import StageSeconds, TimePrediction
from runner.profile import SecondsSource
from runner.schedule.lowering.program import lower
from runner.schedule.simulation.clock import Simulation, StageCosts, play, simulate
from runner.schedule.simulation.cores import span_on_cores
from runner.schedule.simulation.opportunistic import realised
from runner.schedule.steady import period
from runner.schedule.values import COMPUTE, Op, Program
from runner.schedule.walk import in_order

__all__ = ["measured_time", "played_time"]


def measured_time(
    program: Program, costs: StageCosts, seconds: StageSeconds, *, post_validation: bool = False
) -> TimePrediction:
    """The time of a step whose stages have been measured in place; they have waited for cores and hosts already.

    Args:
        program: the lowered schedule that the ranks run.
        costs: the durations in its plan; those of what was not measured are used.
        seconds: what they have measured. If a whole window was measured, too, what it takes beyond the played one is
            added to the step.
        post_validation: see :func:`played_time`.
    """
    costs = _measured(costs, seconds, program.schedule.stages)
    return played_time(program, costs, "measured", post_validation=post_validation, window=seconds.window)


def played_time(
    program: Program,
    costs: StageCosts,
    source: SecondsSource,
    *,
    post_validation: bool = False,
    at_once: float | None = None,
    window: float | None = None,
) -> TimePrediction:
    """The time of one optimizer step of one replica's pipeline.

    Args:
        program: the replica's lowered schedule.
        costs: the durations of its actions and messages.
        source: where they are from.
        post_validation: whether ranks begin a step while others end the one before; the time is that of one of many.
        at_once: number of the pipeline's ranks that can compute at full speed at the same time; None: all of them.
        window: the measured seconds of a whole window without an update; None: it was not measured.
    """
    schedule = program.schedule
    if schedule.ahead:
        program = lower(realised(schedule, costs), costs)
    windows = schedule.windows
    flushed = not (post_validation or schedule.is_asynchronous)
    step, span, pipeline = (_of_one_step if flushed else _between_steps)(program, costs)
    if window is not None and flushed and windows == 1:
        step += max(0.0, window - span)
    alone = None
    if at_once is not None:
        alone, step = step, _on_cores(program, costs, (step, span, pipeline), at_once, flushed=flushed)
    busy = tuple(each / windows for each in pipeline.computing)
    fills = tuple(each / windows for each in pipeline.filling) if schedule.filling is not None else ()
    waits = tuple(each / windows for each in pipeline.waiting_for_host) if costs.moves or costs.weights else ()
    return TimePrediction(step, 1.0 - sum(busy) / (schedule.ranks * span), busy, source, costs, fills, alone, waits)


def _of_one_step(program: Program, costs: StageCosts) -> tuple[float, float, Simulation]:
    """A step that begins when the one before has ended, or the mean of a stream's, which is played whole.

    Returns:
        seconds of the step, seconds of its forwards and backwards alone, and when these run.
    """
    walked, windows = in_order(program), program.schedule.windows
    whole = pipeline = play(program, walked, costs)
    if windows > 1:  # a window's reductions and updates come before the next one's forwards
        pipeline = play(program, walked, _pipeline_alone(costs))
    return whole.last({Op.STEP}) / windows, pipeline.last(COMPUTE) / windows, pipeline


def _between_steps(program: Program, costs: StageCosts) -> tuple[float, float, Simulation]:
    """The same for one of many steps, each of which a rank begins as soon as it has ended the one before."""
    return period(program, costs), period(program.schedule, costs), simulate(program, costs)


def _on_cores(
    program: Program, costs: StageCosts, played: tuple[float, float, Simulation], at_once: float, *, flushed: bool
) -> float:
    """The seconds of a step, which were ``played`` with a core for every rank, if ranks share cores.

    After the last backward all ranks reduce and update, so that this takes as many times as long as there are ranks for
    a core. Of steps that overlap, what the ranks do in one is a lower bound.
    """
    schedule, (step, span, pipeline) = program.schedule, played
    if not flushed:
        return max(step, sum(pipeline.busy) / schedule.windows / at_once)
    after = (step - span) * schedule.ranks / at_once
    in_turns = span_on_cores(schedule, costs, at_once) / schedule.windows
    if costs.moves or costs.weights:  # ranks that compute in turns were not played with their hosts
        in_turns = max(in_turns, span)
    return in_turns + after


def _pipeline_alone(costs: StageCosts) -> StageCosts:
    return replace(costs, reduce=(), step=())


def _measured(costs: StageCosts, seconds: StageSeconds, stages: int) -> StageCosts:
    return StageCosts(
        F=seconds.forward,
        B=seconds.backward,
        I=seconds.input_gradient or [each / 2 for each in seconds.backward],
        W=seconds.weight_gradient or [each / 2 for each in seconds.backward],
        comm=(seconds.message,) * (stages - 1),
        reduce=seconds.reduce or costs.reduce,
        step=seconds.step,
        fills=costs.fills,
        stash=costs.stash,
    )
