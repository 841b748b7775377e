"""All rules of the plan, which need a schedule, the model's layers or the number of started processes."""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.rules.table import Computed, Row, Table
from runner.config.schema import RunConfig
from runner.errors import Problem
from runner.plan.activations import activation_problems
from runner.plan.cut.partition import partition_problems
from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan, schedule_problems
from runner.plan.rules.facts import OrderFacts, RequestFacts
from runner.plan.rules.migration import MIGRATION
from runner.plan.rules.prediction import CORRECTED, NO_PREDICTION, PREDICTED
from runner.plan.rules.schedule import (
    ASYNCHRONOUS,
    AVERAGED,
    COMPRESSION,
    FILLED,
    LENDING,
    LENT,
    NEWEST,
    OFFLOADED,
    OPTIMIZERS_ON_ORDERS,
    POST_VALIDATION,
    SPLIT,
    SWAPPED,
    TWINS,
    UNLIKE,
    WAVES,
)
from runner.plan.rules.shares import SHARES
from runner.plan.rules.tensors import TENSOR_TABLES
from runner.plan.rules.zero import SHARING_TABLES
from runner.profile import ChangedState, OddWeight
from runner.schedule.traits import traits_of
from runner.schedule.values import Schedule

__all__ = ["ORDER_TABLES", "PLACE_TABLES", "SCHEDULE", "order_problems", "plan_problems"]

SCHEDULE: Table[RequestFacts] = Table(
    "The schedule that is asked for",
    (
        Computed(
            "schedule.*, parallelism.pipeline",
            lambda f: schedule_problems(f.config),
            "ranks, chunks and micro-batches must be such that there is an order, and keys must be the schedule's own",
            "`runner schedule --list` prints each schedule's constraints",
            "the schedule's entry in runner/schedule/catalogue",
        ),
    ),
)

ORDER_TABLES: tuple[Table[OrderFacts], ...] = (
    Table(
        "Stages of the model",
        (
            Computed(
                "partition.*, parallelism.pipeline",
                lambda f: partition_problems(
                    f.config.partition.name, f.config.partition.boundaries, f.order.stages, f.num_layers
                ),
                "every stage must have a layer; boundaries must lie within the model, one for each stage but the first",
            ),
        ),
    ),
    MIGRATION,
    ASYNCHRONOUS,
    AVERAGED,
    WAVES,
    NEWEST,
    PREDICTED,
    NO_PREDICTION,
    CORRECTED,
    SPLIT,
    *SHARING_TABLES,
    LENT,
    OFFLOADED,
    LENDING,
    SWAPPED,
    FILLED,
    *OPTIMIZERS_ON_ORDERS,
    COMPRESSION,
    TWINS,
    UNLIKE,
    POST_VALIDATION,
    SHARES,
    *TENSOR_TABLES,
)
"""The tables that are checked, in this order, if the schedule itself has no problem."""

PLACE_TABLES: tuple[Table[RequestFacts], ...] = (
    Table(
        "Layers that a policy names",
        (
            Computed(
                "activation_checkpoint.*",
                lambda f: activation_problems(f.config, f.layer_names),
                "layers that a policy names must be the model's; your own policy must import and take its options",
            ),
        ),
        applies=lambda f: bool(f.layer_names),
    ),
    Table(
        "Started processes",
        (
            Row(
                "parallelism",
                lambda f: f.started is not None and f.started != f.world_size,
                "pipeline x data x tensor makes {world_size} ranks, {started} were started",
                fix="{world_size} processes, or other degrees",
            ),
        ),
    ),
)
"""The tables that are checked last, for every schedule."""


def plan_problems(
    config: RunConfig,
    num_layers: int,
    *,
    world_size: int | None = None,
    layer_names: Sequence[str] = (),
    statistics: Sequence[str] = (),
    odd_weights: Sequence[OddWeight] = (),
    changed_buffers: Sequence[str] = (),
    shared_buffers: Sequence[str] = (),
    changed_states: Sequence[ChangedState] = (),
) -> list[Problem]:
    """Check the rules that need a schedule or a topology; other rules belong to the configuration.

    Args:
        config: the request.
        num_layers: number of layers of the model.
        world_size: number of ranks that were started already (torchrun, srun); None if the runner starts them.
        layer_names: the names of the layers; without them, layer names in the request are not checked.
        statistics: the names of layers with running statistics.
        odd_weights, changed_buffers, shared_buffers, changed_states: see :class:`runner.profile.ModelProfile`.
    """
    facts = RequestFacts(config, tuple(layer_names), world_size)
    problems = list(SCHEDULE.problems(facts))
    if not problems and not is_chosen_by_plan(config):
        schedule = executed_schedule(config)
        problems += order_problems(
            config, schedule, num_layers, statistics, odd_weights, changed_buffers, shared_buffers, changed_states
        )
    return [*problems, *(problem for table in PLACE_TABLES for problem in table.problems(facts))]


def order_problems(
    config: RunConfig,
    schedule: Schedule,
    num_layers: int,
    statistics: Sequence[str] = (),
    odd_weights: Sequence[OddWeight] = (),
    changed_buffers: Sequence[str] = (),
    shared_buffers: Sequence[str] = (),
    changed_states: Sequence[ChangedState] = (),
) -> list[Problem]:
    """Problems of the request with a schedule.

    Args:
        config: the request.
        schedule: the schedule that is planned for it.
        num_layers, statistics, odd_weights, changed_buffers, shared_buffers, changed_states: see :func:`plan_problems`.
    """
    tensors = tuple(odd_weights), tuple(changed_buffers), tuple(shared_buffers), tuple(changed_states)
    facts = OrderFacts(config, traits_of(schedule), num_layers, tuple(statistics), *tensors)
    return [problem for table in ORDER_TABLES for problem in table.problems(facts)]
