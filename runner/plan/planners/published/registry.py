"""The planners by name, with what each chooses and by what: the catalogue of planners."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from runner.plan.planners.published import (
    alpa,
    autopipe,
    beaumont,
    chimera,
    dapple,
    efftra,
    hetpipe,
    megatron,
    pipe_torch,
    pipedream,
    piper,
    rl,
    two_bw,
    unity,
    varuna,
    vpipe,
)
from runner.plan.planners.values import PlanningAnswer, PlanningProblem
from runner.schedule.catalogue.registry import find_spec

__all__ = ["KINDS", "PUBLISHED", "Planner", "PlannerKind", "answer_of"]

Planner = Callable[[PlanningProblem], PlanningAnswer | None]
"""Answers a problem; None if nothing fits by its own model."""

_CUTS, _REPLICAS, _PARTS, _AGAIN = "PP", "DP", "TP", "checkpointing"


@dataclass(frozen=True, slots=True)
class PlannerKind:
    """A published planner.

    Args:
        plan: the planner.
        axes: what it decides, of ``PP`` (cut or depth), ``DP`` (replicas), ``TP`` (parts) and ``checkpointing``.
        chooses: the same in words.
        by: how.
        lacks: what its model leaves out.
    """

    plan: Planner
    axes: tuple[str, ...]
    chooses: str
    by: str
    lacks: str


KINDS: Mapping[str, PlannerKind] = {
    "pipedream": PlannerKind(
        pipedream.plan,
        (_REPLICAS, _CUTS),
        "cut, replicas of each stage",
        "dynamic program, the least slowest stage",
        "filling the pipeline, memory",
    ),
    "dapple": PlannerKind(
        dapple.plan,
        (_REPLICAS, _CUTS),
        "cut, replicas of each stage, pipelines, micro-batches",
        "dynamic program, then the flushed step's length",
        "memory",
    ),
    "2bw": PlannerKind(
        two_bw.plan,
        (_REPLICAS, _CUTS, _AGAIN),
        "depth, width, micro-batch, recomputation of all or none",
        "enumeration of even blocks",
        "filling the pipeline",
    ),
    "piper": PlannerKind(
        piper.plan,
        (_PARTS, _REPLICAS, _CUTS, _AGAIN),
        "cut, replicas and parts of each stage, recomputation by layer",
        "dynamic program with a knapsack",
        "filling the pipeline",
    ),
    "alpa": PlannerKind(
        alpa.plan,
        (_PARTS, _REPLICAS, _CUTS, _AGAIN),
        "cut, replicas and parts of each stage, micro-batches, recomputation by stage",
        "dynamic program under each slowest stage",
        "bubbles of unlike stages: it is too long",
    ),
    "unity": PlannerKind(
        unity.plan,
        (_PARTS, _REPLICAS),
        "parts and replicas of each layer",
        "best-first search over substitutions",
        "pipelines, recomputation",
    ),
    "rl": PlannerKind(rl.plan, (_CUTS,), "cut, depth", "samples of a policy that learns, played", "recomputation"),
    "autopipe": PlannerKind(
        autopipe.plan,
        (_CUTS,),
        "cut, depth, halves of the first micro-batches",
        "moves around the slowest stage, played without messages",
        "messages, recomputation",
    ),
    "hetpipe": PlannerKind(
        hetpipe.plan,
        (_REPLICAS, _CUTS),
        "cut, workers, micro-batches under way",
        "dynamic program, the least slowest stage that fits",
        "filling the pipeline, recomputation",
    ),
    "pipe_torch": PlannerKind(
        pipe_torch.plan,
        (_REPLICAS, _CUTS),
        "cut, replicas of each stage",
        "dynamic program without overlap",
        "filling the pipeline, memory",
    ),
    "varuna": PlannerKind(
        varuna.plan,
        (_REPLICAS, _CUTS),
        "depth, replicas, micro-batch",
        "plays of its order, even blocks",
        "uneven blocks",
    ),
    "chimera": PlannerKind(
        chimera.plan,
        (_REPLICAS, _CUTS, _AGAIN),
        "depth, micro-batch, recomputation of all or none",
        "enumeration of even blocks, its schedule's critical path",
        "uneven blocks",
    ),
    "efftra": PlannerKind(
        efftra.plan,
        (_REPLICAS, _CUTS),
        "cut, replicas of each stage",
        "dynamic program, compared with both extremes",
        "memory",
    ),
    "megatron": PlannerKind(
        megatron.plan,
        (_PARTS, _REPLICAS, _CUTS, _AGAIN),
        "parts, depth, replicas, micro-batch, recomputation of all or none",
        "takeaways, even blocks",
        "messages, uneven blocks",
    ),
    "vpipe": PlannerKind(
        vpipe.plan,
        (_CUTS, _AGAIN),
        "cut, depth, recomputation and moves to the host by layer",
        "exact in a stage, in turn with moves of layers",
        "bubbles of unlike stages",
    ),
    "beaumont": PlannerKind(
        beaumont.plan,
        (_CUTS,),
        "cut, depth",
        "shortest period that fits, 1F1B*",
        "filling the pipeline, recomputation",
    ),
}
"""Every published planner, none of which asks another."""

PUBLISHED: Mapping[str, Planner] = {name: kind.plan for name, kind in KINDS.items()}


def answer_of(name: str, problem: PlanningProblem) -> PlanningAnswer | None:
    """What a published planner answers, with the order and ZeRO that a user has named.

    These planners read no key that is chosen already. Where an answer differs from what is fixed, ``needs`` says so.
    """
    answer = PUBLISHED[name](problem)
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
