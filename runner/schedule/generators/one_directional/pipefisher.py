"""PipeFisher: K-FAC's work in the bubbles of a schedule, spread over as many optimizer steps as it takes.

The work is that of the first step's micro-batches. The number of steps is the interval after which the inverses are
new.

Source: Osawa, Li and Hoefler, "PipeFisher: Efficient Training of Large Language Models Using Pipelining and Fisher
Information Matrices", 2023.
"""

from __future__ import annotations

from runner.errors import Problem
from runner.options import Option
from runner.schedule.fills import Filling, FillKind, Shown
from runner.schedule.generators.fill_bubbles import fill_bubbles
from runner.schedule.generators.one_directional.gpipe import gpipe
from runner.schedule.generators.one_directional.one_f_one_b import one_f_one_b
from runner.schedule.kinds import ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Schedule

__all__ = ["CURV_A", "CURV_B", "INV_A", "INV_B", "KFAC", "SPEC", "pipefisher"]

_OF_FIRST = "curvature is that of the first window's micro-batches"
_OF_STAGE = "an inversion is of no micro-batch"

CURV_A = FillKind(
    name="CURV_A",
    cost="curvature",
    default_cost=0.5,
    character="+",
    color="#e8d174",
    label="K-FAC: sums of inputs",
    shown_by=Shown.FORWARD,
    rule=_OF_FIRST,
)
"""Add what a forward showed of the layers' inputs to their factors."""

CURV_B = FillKind(
    name="CURV_B",
    cost="curvature",
    default_cost=0.5,
    character="*",
    color="#d9b13c",
    label="K-FAC: sums of output gradients",
    shown_by=Shown.GRADIENT,
    rule=_OF_FIRST,
)
"""The same of a backward and the gradients of the layers' outputs."""

INV_A = FillKind(
    name="INV_A",
    cost="inversion",
    default_cost=1.5,
    character="=",
    color="#c98bb9",
    label="K-FAC: inversions of inputs' factors",
    follows="CURV_A",
    rule=_OF_STAGE,
)
"""Invert the factors of a stage's inputs."""

INV_B = FillKind(
    name="INV_B",
    cost="inversion",
    default_cost=1.5,
    character="=",
    color="#b0699c",
    label="K-FAC: inversions of output gradients' factors",
    follows="CURV_B",
    rule=_OF_STAGE,
)
"""Invert those of the gradients of its outputs."""

KFAC = Filling(
    work="K-FAC",
    key="curvature",
    brings="inverses",
    legend="+ and * K-FAC's sums of inputs and of output gradients; = its inversions",
    optimizer="kfac",
    description="the sums and inversions of K-FAC",
    kinds=(CURV_A, CURV_B, INV_A, INV_B),
)
"""All of it; sums come before inversions, inputs before output gradients."""


def pipefisher(base: Schedule, costs: Costs | StageCosts) -> Schedule:
    """``base`` as a stream of as many steps as K-FAC's work needs, with that work in it.

    Args:
        base: one step of one pipeline with whole backwards.
        costs: durations of its compute and of the work.
    """
    if isinstance(costs, Costs):
        costs = costs.per_stage(base.stages, base.chunks, base.parts, KFAC)
    return fill_bubbles(base, KFAC, costs, "pipefisher")


_FILLED = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _pipefisher(request: ScheduleRequest) -> Schedule:
    base = _FILLED[request.option("base") or "1f1b"]
    return pipefisher(base(request.ranks, request.microbatches), request.costs)


def _pipefisher_problems(request: ScheduleRequest) -> list[Problem]:
    base = request.option("base")
    if base is None or base in _FILLED:
        return []
    why = "Its work needs whole backwards, and every micro-batch of a stage on one rank"
    if base == "chimera":
        why = "Its pipelines hold each stage twice, and each copy sees a part of the micro-batches"
    return [Problem("schedule.base", base, f"must be one of {', '.join(_FILLED)}", why, "schedule.base=1f1b")]


SPEC = ScheduleSpec(
    name="pipefisher",
    position=180,
    description="1f1b or gpipe (schedule.base) with K-FAC's sums and inversions in the bubbles of several steps",
    summary="`1f1b` or `gpipe` (`schedule.base`) with the sums and inversions of `optimizer=kfac` in the bubbles",
    figures=("0.158, filled", "4 and more"),
    source="Osawa, Li and Hoefler, PipeFisher, 2023",
    formulas=None,
    generate=_pipefisher,
    options=(
        Option(
            "base",
            str,
            "the schedule whose bubbles are filled: 1f1b, gpipe; null = 1f1b",
            "gpipe",
            elsewhere="The other schedules stand on none",
            legal=tuple(_FILLED),
        ),
    ),
    constraint=_pipefisher_problems,
    by_costs=True,
    searched=False,
)
