"""The catalogue of planners: the published ones by name, and a user's own.

A published one is a module of this folder with its ``PLANNER``, and an option file of its name in ``conf/planner/``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from runner.config.schema import PlannerConfig
from runner.errors import Problem, RequestError
from runner.plan.planners import published
from runner.plan.planners.kinds import Planner, PlannerKind
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.catalogue.registry import find_spec
from runner.targets import call_named, import_named

__all__ = ["KINDS", "PUBLISHED", "answer_of", "form_that_runs", "planner_of"]

_TARGET = "planner.target"


def _found() -> list[PlannerKind]:
    modules = (import_module(each.name) for each in pkgutil.iter_modules(published.__path__, f"{published.__name__}."))
    found = [module.PLANNER for module in modules if hasattr(module, "PLANNER")]
    return sorted(found, key=lambda kind: (kind.position, kind.name))


KINDS: Mapping[str, PlannerKind] = {kind.name: kind for kind in _found()}
"""Every published planner, none of which asks another."""

PUBLISHED: Mapping[str, Planner] = {name: kind.plan for name, kind in KINDS.items()}


def form_that_runs(section: PlannerConfig, problem: PlanningProblem) -> str | None:
    """Another form of the planner's model, with which it finds a layout that the engine runs; None: there is none."""
    others = KINDS[section.name].forms if section.target is None and section.name in KINDS else {}
    answers = ((form, plan(problem)) for form, plan in others.items() if form != section.form)
    return next((form for form, answer in answers if answer is not None and not answer.needs), None)


def planner_of(section: PlannerConfig) -> Planner:
    """The planner that a request names, which is not the joint one.

    A ``target`` is a user's own: a :class:`PlannerKind`, or a function of a :class:`PlanningProblem` and the request's
    ``kwargs`` that returns a :class:`PlanningAnswer`, or None where it finds no layout that fits.

    Raises:
        RequestError: the target cannot be imported.
    """
    if section.target is None:
        kind = KINDS[section.name]
        return kind.forms.get(section.form, kind.plan)
    target = section.target

    def fits(found: object) -> bool:
        return isinstance(found, PlannerKind) or callable(found)

    found = import_named(_TARGET, target, what="function or PlannerKind", fits=fits)
    function = found.plan if isinstance(found, PlannerKind) else found

    def plan(problem: PlanningProblem) -> PlanningAnswer | None:
        answer = call_named(_TARGET, target, function, problem, **section.kwargs)
        if answer is None:
            return None
        if wrong := _wrong_of(answer, problem):
            raise RequestError([Problem(_TARGET, target, *wrong)])
        named: PlanningAnswer = replace(answer, planner=section.name)
        return named

    return plan


def _wrong_of(answer: object, problem: PlanningProblem) -> tuple[str, str] | None:
    """What must hold of the answer of a user's planner, and what it is instead; None if it is a layout."""
    if not isinstance(answer, PlanningAnswer):
        return "must return a PlanningAnswer, or None", f"It returned a {type(answer).__name__}"
    if answer.world_size > problem.ranks:
        return f"must return a layout of at most {problem.ranks} ranks", f"It returned one of {answer.world_size}"
    last = len(problem.layers) - 1
    if [layer for stage in answer.stages for layer in range(stage[0], stage[1] + 1)] != list(range(last + 1)):
        return f"must return stages of layers 0 to {last}, each once and in order", f"It returned {answer.stages}"
    known = {way.name for division in problem.divisions for way in division.kept}
    if len(answer.kept) != len(answer.stages) or not {*answer.kept} <= known:
        return f"must return one of {', '.join(sorted(known))} for each stage", f"It returned {answer.kept}"
    return None


def answer_of(plan: Planner, problem: PlanningProblem) -> PlanningAnswer | None:
    """What a planner answers, with the order and ZeRO that a user has named.

    These planners read no key that is chosen already. Where an answer differs from what is fixed, ``needs`` says so.
    """
    answer = plan(problem)
    if answer is None:
        return None
    if answer.order is not None and len(problem.orders) == 1 and answer.order.chunks == problem.orders[0].chunks:
        answer = replace(answer, order=problem.orders[0])
    spec = find_spec(answer.order.schedule) if answer.order is not None else None
    if spec is not None and answer.turns and "replicas" not in spec.keys:
        why = f"schedule={spec.name} has one rank for each stage, and its stages have different numbers"
        answer = replace(answer, needs=(*answer.needs, why))
    if spec is not None and answer.shares and "shares" not in spec.keys:
        why = f"schedule={spec.name} has micro-batches of one size, and its first ones are halves"
        answer = replace(answer, needs=(*answer.needs, why))
    if len(problem.zero) == 1 and answer.data > 1:
        answer = replace(answer, zero=problem.zero[0])
    chosen = {
        "parallelism.pipeline": answer.pipeline,
        "parallelism.data": answer.data,
        "parallelism.tensor": answer.tensor,
        "schedule.microbatches": answer.microbatches,
        "partition.boundaries": [first for first, _ in answer.stages[1:]],
    }
    fixed = problem.fixed or {}
    others = [
        f"{key}={fixed[key.partition('.')[2]]} is asked for, and it takes {own}"
        for key, own in chosen.items()
        if fixed.get(key.partition(".")[2], own) != own
    ]
    if answer.order is not None and len(problem.orders) == 1 and answer.order != problem.orders[0]:
        others.append(f"schedule={problem.orders[0].schedule} is asked for, and it takes {answer.order.schedule}")
    why = ", by a cost model that reads no key which is chosen already"
    return replace(answer, needs=(*answer.needs, *(f"{each}{why}" for each in others)))
