"""ZeRO's rules that need a schedule: which pipelines may shard gradients, states and weights, and by what code."""

from __future__ import annotations

from collections.abc import Callable

from runner.config.precision import PRECISIONS
from runner.config.rules.table import Row, Table
from runner.config.schema import RunConfig
from runner.optim.catalogue.registry import OPTIMIZERS, find_optimizer
from runner.plan.rules.facts import OrderFacts
from runner.schedule.traits import ScheduleTraits, traits_of
from runner.schedule.values import Schedule

__all__ = ["SHARING_TABLES", "shares_by_itself"]

_BY_WEIGHT = tuple(name for name, kind in OPTIMIZERS.items() if kind.by_weight)


def shares_by_itself(config: RunConfig, schedule: Schedule) -> bool:
    """Whether the runner, not DeepSpeed, shards states: :class:`runner.optim.states.shared.SharedStates`."""
    order, stage = traits_of(schedule), config.zero.stage
    divides = config.parallelism.tensor > 1 and stage == 1
    return bool(stage) and (divides or _holds_several(order) or _runs_twice(order))


def _holds_several(order: ScheduleTraits) -> bool:
    """Whether a rank has several stages or copies, for which DeepSpeed's one engine per rank is not enough."""
    return order.ranks > 1 and (order.has_copies or not order.one_stage_per_rank)


def _runs_twice(order: ScheduleTraits) -> bool:
    """Whether backwards are split or forwards run twice, so that DeepSpeed's hooks cannot count them."""
    return order.ranks > 1 and not _holds_several(order) and (order.splits_backward or order.recomputes)


def _divides(facts: OrderFacts) -> bool:
    """Whether ranks divide layers, and nothing of the schedule keeps DeepSpeed away already."""
    return facts.config.parallelism.tensor > 1 and not (_holds_several(facts.order) or _runs_twice(facts.order))


def _table(
    title: str,
    against: str,
    source: str,
    applies: Callable[[OrderFacts], bool],
    where: str = "schedule={order.name}",
    fix: str = "schedule=1f1b",
    *,
    is_for_all: bool = True,
) -> Table[OrderFacts]:
    """The rules of the runner's own sharding, for layouts with which DeepSpeed's engine is not used.

    Args:
        is_for_all: whether DeepSpeed's engine is used with no stage, so that all stages but the first are refused.
    """
    own = f"{against} ({source}); there the runner itself shares out the states, and these alone"
    needed = f"must be {{}} with {where.replace('{', '{{').replace('}', '}}')}".format
    rows: tuple[Row[OrderFacts], ...] = (
        Row("zero.stage", lambda f: f.config.zero.stage != 1, needed(1), own, source, "zero.stage=1"),
        Row(
            "offload.optimizer",
            lambda f: f.config.offload.optimizer != "none",
            needed("none"),
            own,
            source,
            fix,
        ),
        Row("zero.config", lambda f: f.config.zero.config is not None, needed("null"), own, source, "zero.config=null"),
        Row(
            "optimizer.name",
            lambda f: (kind := find_optimizer(f.config.optimizer)) is None or not kind.by_weight,
            needed(f"one of {', '.join(_BY_WEIGHT)}"),
            own,
            source,
            "optimizer=adamw",
        ),
        Row(
            "precision.name",
            lambda f: PRECISIONS[f.config.precision.name].master_weights,
            needed("another"),
            f"{own}, not fp32 masters",
            source,
            "precision=bf16_mixed",
        ),
    )
    return Table(title, rows if is_for_all else rows[1:], applies=lambda f: bool(f.config.zero.stage) and applies(f))


SHARING_TABLES = (
    _table(
        "ZeRO with schedules of several stages per rank",
        "A rank holds several stages or replicas",
        "deepspeed/runtime/engine.py has one optimizer per engine, and clips by its own norm",
        lambda f: _holds_several(f.order),
    ),
    _table(
        "ZeRO with schedules that split backwards or run forwards twice",
        "Its backwards are split, or its forwards run twice",
        "deepspeed/runtime/zero/stage_1_and_2.py: create_gradient_handling_hooks counts those of one whole backward",
        lambda f: _runs_twice(f.order),
    ),
    _table(
        "ZeRO 1 with layers that ranks divide",
        "zero.stage=1 is the same in every schedule",
        "runner/optim/states/shared.py",
        lambda f: f.config.zero.stage == 1 and _divides(f),
        "parallelism.tensor={config.parallelism.tensor}",
        "zero.stage=2",
        is_for_all=False,
    ),
)
"""The tables of this file; at most one of them applies to a schedule."""
