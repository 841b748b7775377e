"""What a run predicts of its weights: the formula and, for each stage, how far ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runner.config.schema import RunConfig
from runner.optim.catalogue.drift import DRIFT
from runner.optim.catalogue.prediction import OwnFormula, PredictionKind
from runner.optim.catalogue.registry import PREDICTIONS, find_prediction, optimizer_of
from runner.schedule.catalogue.registry import SPECS
from runner.schedule.gaps import PRESETS, StageGaps, copies_held
from runner.schedule.values import Schedule

__all__ = ["Prediction", "kind_asked", "prediction_of", "predicts", "preset_asked"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a run predicts.

    Args:
        kind: the formula.
        stages: the gaps of each stage; None for a stage whose weights are not predicted.
        decays: for each stage, the decay of the running mean of its weights' changes; empty if no such mean is kept.
        copies: for each stage, the number of copies of its weights that its predictions need.
        values: for each element of a predicted weight, how many values the optimizer keeps for predictions.
    """

    kind: PredictionKind
    stages: tuple[StageGaps | None, ...]
    decays: tuple[float, ...]
    copies: tuple[int, ...]
    values: int


def kind_asked(config: RunConfig, schedule: str) -> PredictionKind | None:
    """The prediction that a request asks for, or that its schedule brings; None if nothing is predicted.

    Args:
        config: the request.
        schedule: the name of its schedule.
    """
    asked = config.weight_prediction
    if asked.target is not None and asked.name not in PREDICTIONS:
        return find_prediction(asked)
    name = asked.name
    if name is None and schedule in SPECS:
        name = SPECS[schedule].prediction
    kind = PREDICTIONS.get(name or "none")
    return None if kind is None or kind.predict is None else kind


def preset_asked(config: RunConfig, schedule: str) -> str | None:
    """The name of the published gaps that a request asks for, or that its schedule brings; None: none."""
    asked = config.weight_prediction
    if asked.preset is not None or asked.gap is not None or schedule not in SPECS:
        return asked.preset
    return SPECS[schedule].gaps


def predicts(config: RunConfig, schedule: str) -> bool:
    """Whether weights are predicted, or backwards corrected, with the schedule of this name."""
    return kind_asked(config, schedule) is not None or config.schedule.option("discrepancy_correction") is not None


def prediction_of(config: RunConfig, schedule: Schedule) -> Prediction | None:
    """The prediction of a request without problems; None if nothing is predicted."""
    if (correction := config.schedule.option("discrepancy_correction")) is not None:
        return _correction(correction, schedule)
    kind = kind_asked(config, schedule.name)
    if kind is None:
        return None
    stages = tuple(_gaps(config, kind, schedule, stage) for stage in range(schedule.stages))
    if all(gaps is None for gaps in stages):
        return None
    if isinstance(kind.predict, OwnFormula):  # rules have asked for its reasons, which a plan cannot hold
        kind = PredictionKind(
            name=kind.name, description="", predict=kind.predict, temporaries=kind.temporaries, reads=kind.reads
        )
    motion = optimizer_of(config.optimizer).motion
    keeps_gradient = motion is not None and motion.needs_gradient
    return Prediction(kind, stages, (), _copies(schedule, stages), int(keeps_gradient))


def _gaps(config: RunConfig, kind: PredictionKind, schedule: Schedule, stage: int) -> StageGaps | None:
    asked, size = config.weight_prediction.gap, schedule.window_size
    if not schedule.is_asynchronous:
        return StageGaps(kind.flushed_gap if asked is None else asked, backward=None)
    backward = 0 if schedule.reads_newest else None
    if asked is not None:
        return StageGaps(asked, backward)
    preset = preset_asked(config, schedule.name)
    if preset is not None:
        return PRESETS[preset].of_stage(schedule.ranks, stage, size)
    return StageGaps(None, backward) if schedule.lags[stage] else None


def _correction(share: float, schedule: Schedule) -> Prediction:
    """The corrected backwards of PipeMare.

    Args:
        share: C, the part of a change that is left in the mean after as many steps as a stage's forwards are late.
        schedule: the schedule, whose forwards read the newest weights.
    """
    ages = [lag / schedule.window_size for lag in schedule.lags]
    stages = tuple(StageGaps(0, 0, goes_back=True) if age else None for age in ages)
    decays = tuple(math.pow(share, 1 / age) if age else 0.0 for age in ages)
    return Prediction(DRIFT, stages, decays, _copies(schedule, stages), 1)


def _copies(schedule: Schedule, stages: tuple[StageGaps | None, ...]) -> tuple[int, ...]:
    return tuple(0 if gaps is None else copies_held(schedule, stage, gaps) for stage, gaps in enumerate(stages))
