"""Seconds of predictions of weights, which are made before forwards and backwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.plan.prediction import Prediction
from runner.plan.stages.figures import StageFigures
from runner.profile import ModelProfile
from runner.schedule.gaps import StageGaps
from runner.schedule.simulation.clock import StageCosts
from runner.schedule.values import Schedule

__all__ = ["predictions_made", "with_predictions"]


def with_predictions(
    costs: StageCosts,
    prediction: Prediction | None,
    schedule: Schedule,
    profile: ModelProfile,
    figures: Sequence[StageFigures],
) -> StageCosts:
    """``costs`` with the predictions in forwards and backwards; one takes as long as the optimizer's update.

    A prediction passes over the weights and the optimizer's states once, as an update does. Copies of what was
    predicted once in a window are not counted.
    """
    if prediction is None:
        return costs
    made = [predictions_made(schedule, gaps) for gaps in prediction.stages]
    seconds = [stage.gradient_bytes * profile.optimizer_seconds_per_byte for stage in figures]
    return replace(
        costs,
        F=[own + before * each for own, (before, _), each in zip(costs.F, made, seconds, strict=True)],
        B=[own + before * each for own, (_, before), each in zip(costs.B, made, seconds, strict=True)],
        I=[own + before * each for own, (_, before), each in zip(costs.I, made, seconds, strict=True)],
    )


def predictions_made(schedule: Schedule, gaps: StageGaps | None) -> tuple[float, float]:
    """The mean number of predictions before a forward, and before a backward, of one stage.

    Where backwards use what their forward has used, each window predicts once for each version that is the newest at
    one of its forwards: these are at most two in an asynchronous schedule with enough micro-batches, and one otherwise.
    Where a backward has a prediction of its own, its memory is filled anew before each forward and each backward.
    """
    if gaps is None:
        return 0.0, 0.0
    if gaps.once:
        return 1 / schedule.window_size, 1 / schedule.window_size
    if gaps.backward is not None:
        return 1.0, 1.0
    most = 2 if schedule.is_asynchronous else 1
    return min(1.0, most / schedule.window_size), 0.0
