"""Rules between layers that move while a run trains, and the run's schedule and model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from runner.config.rules.table import Computed, Row, Table
from runner.config.rules.values import another_schedule
from runner.errors import Problem
from runner.plan.cut.partition import partition_problems
from runner.plan.rules.facts import OrderFacts

__all__ = ["MIGRATION"]

_another = partial(another_schedule, "partition.migrate")


def _other_cuts(facts: OrderFacts) -> Iterator[Problem]:
    asked = facts.config.partition.migrate or {}
    for step, cut in asked.items():
        for problem in partition_problems("manual", cut, facts.order.stages, facts.num_layers):
            if problem.path == "partition.boundaries":
                yield replace(problem, path=f"partition.migrate.{step}", fix="")


MIGRATION: Table[OrderFacts] = Table(
    "Layers that move between stages while a run trains",
    (
        Computed(
            "partition.migrate",
            _other_cuts,
            "each cut must have a boundary for each stage but the first, within the model",
            "The number of stages stays, and every stage has a layer",
        ),
        _another("Its windows overlap, so that no moment is between two steps", lambda order: order.is_asynchronous),
        _another(
            "Several ranks of {order.name} hold a stage, and would have to change it together", lambda o: o.has_copies
        ),
        _another("Each of its pipelines has weights of its own", lambda order: order.own_weights),
        _another("What fills its bubbles belongs to the layers of a stage", lambda order: order.filling is not None),
        _another("Ranks that keep activations of others are told once what these are", lambda o: o.moves_activations),
        _another("Its ranks leave their order by what they know of the messages before", lambda o: o.leaves_its_order),
        Row(
            "model.target",
            lambda f: f.changed_state is not None,
            "must have forwards that change nothing but buffers with partition.migrate",
            "{changed_state} is changed by a forward, and weights, buffers and optimizer states alone move",
            fix="partition.migrate=null",
        ),
        Row(
            "model.target",
            lambda f: f.shared_buffer is not None,
            "must not have a buffer that several layers change with partition.migrate",
            "{shared_buffer} would be on the ranks of several stages, and another one on each",
            fix="partition.migrate=null",
        ),
    ),
    applies=lambda f: f.config.partition.migrate is not None,
    first_of_each_key=True,
)
