"""Makes what keeps the weights of each stage of a rank, and the gradients that belong to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.nn import Parameter

from runner.engine.update.gradients import StageGradients
from runner.engine.update.sets import Keep
from runner.engine.weights.pipelines import PipelineGradients, PipelineWeights
from runner.engine.weights.predicted import PredictedWeights
from runner.engine.weights.store import StageWeights, WeightStore
from runner.model.layers import StageModule
from runner.model.tags import ParameterTag
from runner.plan.prediction import Prediction
from runner.schedule.values import Schedule

__all__ = ["keep_gradients", "make_stores"]


def make_stores(
    stages: Mapping[int, StageModule], schedule: Schedule, prediction: Prediction | None
) -> dict[int, StageWeights]:
    """Make a store for each stage whose weights are predicted, or change between a forward and its backward."""
    found: dict[int, StageWeights] = {}
    for stage, module in stages.items():
        gaps = prediction.stages[stage] if prediction is not None else None
        lag = schedule.lags[stage] if schedule.is_asynchronous else 0
        if schedule.own_weights:
            found[stage] = PipelineWeights(module, schedule.pipeline_of_microbatch)
        elif gaps is not None:
            decay = prediction.decays[stage] if prediction is not None and prediction.decays else None
            found[stage] = PredictedWeights(module, gaps, overlaps=schedule.is_asynchronous, decay=decay)
        elif lag:
            found[stage] = WeightStore(module, lag, schedule.window_size, reads_newest=schedule.reads_newest)
    return found


def keep_gradients(keep: Keep, stores: Mapping[int, StageWeights]) -> Keep:
    """``keep``, or what keeps the gradients of each pipeline where pipelines train weights of their own."""

    def make(parameters: Sequence[tuple[str, Parameter]], tag: ParameterTag | None) -> StageGradients:
        store = stores.get(tag.stages[0]) if tag is not None else None
        return (
            PipelineGradients(parameters, tag, store) if isinstance(store, PipelineWeights) else keep(parameters, tag)
        )

    return make
