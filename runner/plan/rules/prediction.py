"""Rules of predicted weights, and of PipeMare's techniques, on their schedule and optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from runner.config.rules.table import Computed, Row, Table
from runner.errors import Problem
from runner.optim.catalogue.prediction import PredictionKind
from runner.optim.catalogue.registry import PREDICTIONS, find_optimizer
from runner.plan.prediction import kind_asked, preset_asked
from runner.plan.rules.facts import OrderFacts
from runner.schedule.gaps import PRESETS

__all__ = ["CORRECTED", "NO_PREDICTION", "PREDICTED"]


def _kind(facts: OrderFacts) -> PredictionKind:
    kind = kind_asked(facts.config, facts.order.name)
    assert kind is not None  # the table applies to no other requests
    return kind


def _reason(facts: OrderFacts) -> str | None:
    """The reason why the optimizer's weights cannot be predicted; None if they can."""
    optimizer = find_optimizer(facts.config.optimizer)
    return None if optimizer is None else _kind(facts).problem_with(optimizer, facts.config.optimizer)


def _unpredictable(facts: OrderFacts) -> Iterator[Problem]:
    reason, name = _reason(facts), facts.config.optimizer.name
    if reason is not None:
        kind = _kind(facts).name
        why = f"The weights of {name} cannot be predicted so: {reason}"
        yield Problem("optimizer", name, f"must be another with weight_prediction={kind}", why, _fitting(facts))


def _fitting(facts: OrderFacts) -> str:
    """An override by which the optimizer's weights are predicted, or none are."""
    optimizer, section = find_optimizer(facts.config.optimizer), facts.config.optimizer
    if optimizer is not None:
        for kind in PREDICTIONS.values():
            if kind.predict is not None and kind.problem_with(optimizer, section) is None:
                return f"weight_prediction={kind.name}"
    return "weight_prediction=none"


def _asks_whole_steps(facts: OrderFacts) -> bool:
    gap = facts.config.weight_prediction.gap
    return _kind(facts).whole_steps and gap is not None and gap != int(gap)


PREDICTED: Table[OrderFacts] = Table(
    "Weights that are predicted",
    (
        Computed(
            "optimizer",
            _unpredictable,
            "must be one whose states say where it moves the weights, as the formula needs it",
        ),
        Row(
            "weight_prediction.gap",
            lambda f: f.config.weight_prediction.gap is None and _kind(f).flushed_gap is None,
            "must be given with schedule={order.name}",
            "No forward of {order.name} is late, so that there is no gap to bridge",
            fix="weight_prediction.gap=1",
            when=lambda f: not f.order.is_asynchronous,
        ),
        Row(
            "weight_prediction.gap",
            _asks_whole_steps,
            "must be a whole number",
            "The optimizer's steps without gradients are made one by one",
            fix="weight_prediction.gap=1",
        ),
        Row(
            "weight_prediction.preset",
            lambda f: preset_asked(f.config, f.order.name) not in (None, *PRESETS),
            f"must be one of {', '.join(PRESETS)}",
            fix="weight_prediction.preset=null",
        ),
        Row(
            "weight_prediction.preset",
            lambda f: preset_asked(f.config, f.order.name) is not None,
            "must be null with schedule={order.name}",
            "The published gaps are those of schedules with one stage per rank whose forwards and backwards read the "
            "newest weights",
            fix="weight_prediction.preset=null",
            when=lambda f: not (f.order.reads_newest and f.order.one_stage_per_rank),
        ),
        Row(
            "weight_prediction",
            lambda f: f.order.is_asynchronous and not f.order.forwards_read_newest,
            "must be none with schedule={order.name}",
            "Its forwards read older weights than the newest, to which the optimizer's states do not belong",
            fix="weight_prediction=none",
        ),
        Row(
            "schedule.post_validation",
            lambda f: f.config.schedule.post_validation,
            "must be false with predicted weights",
            "The weights of a step that is taken back would have been used for predictions",
            fix="schedule.post_validation=false",
        ),
        Row(
            "zero.stage",
            lambda f: f.config.zero.stage is not None,
            "must be null with predicted weights",
            "The states of a weight, from which it is predicted, are spread over the replicas",
            fix="zero.stage=null",
        ),
        Row(
            "compile",
            lambda f: f.config.compile,
            "must be false with predicted weights",
            "A compiled layer keeps to the weights that it was compiled with",
            fix="compile=false",
            when=lambda f: not f.order.is_asynchronous,
        ),
        Row(
            "offload.delay_from",
            lambda f: f.config.offload.delay_from is not None,
            "must be null with predicted weights",
            "A delayed update makes a step later than its states say",
            fix="offload.delay_from=null",
        ),
    ),
    applies=lambda f: kind_asked(f.config, f.order.name) is not None,
)

NO_PREDICTION: Table[OrderFacts] = Table(
    "Keys of predictions where nothing is predicted",
    tuple(
        Row(
            f"weight_prediction.{key}",
            lambda f, key=key: getattr(f.config.weight_prediction, key) is not None,  # type: ignore[misc]
            "must be null without weight_prediction",
            "Nothing is predicted with it",
            fix=f"weight_prediction.{key}=null",
        )
        for key in ("preset", "gap")
    ),
    applies=lambda f: kind_asked(f.config, f.order.name) is None,
)

CORRECTED: Table[OrderFacts] = Table(
    "Corrected backwards",
    (
        Row(
            "weight_prediction",
            lambda f: kind_asked(f.config, f.order.name) is not None,
            "must be none with schedule.discrepancy_correction",
            "Both decide which weights a backward uses",
            fix="weight_prediction=none",
            value=lambda f: f.config.weight_prediction.name,
        ),
    ),
    applies=lambda f: f.config.schedule.option("discrepancy_correction") is not None,
)
