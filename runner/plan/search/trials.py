"""Trials of changed requests: advice is given only where a plan of the change was made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import RequestError
from runner.memory.solve.strategies import OPTIONS
from runner.plan.activations import reads_budget, searches_programs
from runner.plan.values import RunPlan

__all__ = [
    "BUDGET",
    "Overrides",
    "Replan",
    "changed_by",
    "cost_of_trial",
    "doubled",
    "nodes_for",
    "of_equals",
    "of_one_size",
    "policy",
    "spelled",
    "tried",
]

Replan = Callable[[RunConfig], RunPlan]
"""A function that plans a changed request; it raises RequestError if there is no such plan."""

Overrides = Mapping[str, str | int | None]
"""Values by key; a group's name as the key chooses one of its options."""

BUDGET = 200_000
"""What all trials of one plan may cost together, see :func:`cost_of_trial`, so that advice takes a second or two."""

# Keys that belong to one option of a group and have no meaning for its other options.
_OPTIONS_OF_OTHERS = {
    "schedule": ("chunks", "file", "memory_limit", "replicas", "shares", "placement", "starts"),
    "partition": ("boundaries",),
    "activation_checkpoint": tuple(OPTIONS),
}


_OF_A_ROW = 10  # actions that take as long as the row of one layer under one program
_OF_A_LAYER = 1_500  # and as the profile of one layer
_PROGRAMS = 64  # of a stage: as many as rotor offers
_OF_A_SEARCH = 10 * BUDGET  # and as a search for programs that may take minutes


def cost_of_trial(config: RunConfig, overrides: Overrides, plan: RunPlan) -> int:
    """About how many actions the plan of the changed request simulates, with what else takes as long as so many.

    Args:
        config: the request.
        overrides: the change.
        plan: the plan of the request: a changed one compares as many programs, unless its policy is another one.
    """
    changed = changed_by(config, overrides)
    actions = 6 * changed.parallelism.pipeline * changed.schedule.microbatches
    if changed.activation_checkpoint == config.activation_checkpoint:
        programs = max((len(choice.offers) for choice in plan.activations.choices), default=0)
    else:
        programs = _PROGRAMS if reads_budget(changed) else 0
    search = _OF_A_SEARCH if searches_programs(changed) else 0
    profiles = "trainer.threads" in overrides
    return actions + search + len(plan.profile.layers) * (programs * _OF_A_ROW + profiles * _OF_A_LAYER)


def tried(config: RunConfig, overrides: Overrides, replan: Replan) -> RunPlan | None:
    """The plan of the request with the overrides; None if a rule forbids them."""
    changed, known = changed_by(config, overrides), rules(config)
    if any(problem not in known for problem in rules(changed)):
        return None
    try:
        return replan(changed)
    except RequestError:
        return None


def policy(config: RunConfig, name: str) -> Overrides:
    """The change to an activation policy of this package; a target would take its place."""
    own = config.activation_checkpoint.target is not None
    return {"activation_checkpoint": name, **({"activation_checkpoint.target": None} if own else {})}


def nodes_for(config: RunConfig, ranks: int) -> Overrides:
    """The override of ``launcher.nodes`` with which so many ranks are shared evenly; none if the request's does."""
    asked = config.launcher.nodes or 1
    fitting = max(count for count in range(1, asked + 1) if ranks % count == 0)
    return {} if fitting == asked else {"launcher.nodes": fitting}


def of_one_size(config: RunConfig) -> Overrides:
    """The override with which all micro-batches have one size; none if they have."""
    return {} if config.schedule.option("shares") is None else {"schedule.shares": None}


def of_equals(config: RunConfig) -> Overrides:
    """The overrides with which each stage is on one rank of its own, and all micro-batches have one size."""
    keys = ("replicas", "placement", "starts")
    given = (key for key in keys if config.schedule.option(key) is not None)
    return {**{f"schedule.{key}": None for key in given}, **of_one_size(config)}


def changed_by(config: RunConfig, overrides: Overrides) -> RunConfig:
    """A copy of the request with the overrides; an override without a dot chooses the option of a group by name."""
    changed = copy.deepcopy(config)
    for path, value in overrides.items():
        section, _, key = path.partition(".")
        target: Any = getattr(changed, section)
        setattr(target, key or "name", value)
        if not key:
            for name in _OPTIONS_OF_OTHERS.get(section, ()):
                setattr(target, name, None)
    return changed


def spelled(overrides: Overrides) -> str:
    """The overrides as words of a command line."""
    return " ".join(f"{path}={'null' if value is None else value}" for path, value in overrides.items())


def doubled(start: int, end: int) -> list[int]:
    """The numbers start, 2 start, 4 start, … below end, and end itself."""
    values = []
    while start < end:
        values.append(start)
        start *= 2
    return [*values, end]
