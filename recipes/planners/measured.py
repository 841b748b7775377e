"""Layouts that planners choose for layers that sleep: by their own models, played, and measured.

The problem says what the layers sleep, and that four of them with their states fill a device, so that the model needs a
pipeline. What a rank computes takes no core, so every rank has a device of its own on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runner.plan.planners.joint import EFFORTS, JointSearch
from runner.plan.planners.orders import Orders
from runner.plan.planners.published.registry import PUBLISHED
from runner.plan.planners.stages import Candidates, Setting, StageTable
from runner.plan.planners.values import Division, Kept, Line, Order, PlanningAnswer, PlanningProblem
from runner.plan.time.network import one_link
from runner.plan.values import Link
from runner.recipes.finetune.commands import train
from runner.schedule.catalogue.registry import SPECS

__all__ = ["SECONDS", "asleep", "judged", "measure", "problem", "sleeping_words", "words"]

SECONDS = (0.024, 0.008, 0.008, 0.016, 0.008, 0.008, 0.012, 0.008, 0.016, 0.008, 0.012, 0.032)
"""Of a forward for each sample, by layer."""

_BATCH, _RANKS, _STEPS = 32, 4, 6
_FIT = 5  # layers that a device holds
_WEIGHT = 1e6  # bytes of a layer, as the problem says them


def problem(seconds: Sequence[float] = SECONDS) -> PlanningProblem:
    """The layers as a planner sees them: forwards as they sleep, backwards of twice that, and nothing else."""
    layers = len(seconds)
    backward = tuple(Line(0.0, 2 * each) for each in seconds)
    half, nothing = tuple(Line(0.0, each) for each in seconds), (Line(0.0, 0.0),) * layers
    kept = Kept("none", True, nothing, nothing, nothing, backward, half, half)
    sizes = (_WEIGHT,) * layers
    forward = tuple(Line(0.0, each) for each in seconds)
    division = Division(1, forward, sizes, sizes, (0.0,) * layers, (0.0,) * layers, (kept,))
    memory = dict.fromkeys((1, 2, 4), int(2 * _FIT * _WEIGHT))
    orders = (Order("1f1b", 1), Order("interleaved_1f1b", 2))
    return PlanningProblem(
        tuple(map(str, range(layers))), (division,), _RANKS, _BATCH, memory, one_link(Link(0.0)), orders
    )


def asleep() -> list[dict[str, Any]]:
    """A row for each planner: its layout, the step by its own model, and the step of the one simulator."""
    of = problem()
    joint = JointSearch(of, EFFORTS["normal"]).run().answers[0]
    rows = [_row(of, joint)]
    for name, plan in PUBLISHED.items():
        answer = plan(of)
        rows.append({"planner": name, "why_not": "nothing fits"} if answer is None else _row(of, answer))
    return rows


def judged(of: PlanningProblem, answer: PlanningAnswer) -> float:
    """Seconds of a step of an answer that can run, by the play of its order."""
    own = answer.turns, answer.shares, answer.placement, answer.starts
    order = Orders().of(answer.order, answer.pipeline, answer.microbatches, *own)
    assert order is not None  # what planners answer exists
    samples = of.batch / (answer.data * answer.microbatches)
    table = StageTable(of, Setting(of.divisions[0], samples, answer.microbatches, answer.data, answer.zero))
    cut = np.array([[first] for first, _ in answer.stages] + [[len(of.layers)]], dtype=np.int64)
    played = Candidates(cut, np.zeros((len(answer.stages), 1), dtype=np.int64))
    return float(table.step_seconds(played, order)[0])


def _row(of: PlanningProblem, answer: PlanningAnswer) -> dict[str, Any]:
    sizes = "-".join(str(last - first + 1) for first, last in answer.stages)
    order = f" {answer.order.schedule}" if answer.order is not None else ""
    order += f" [{','.join(map(str, answer.turns))}]" if answer.turns else ""
    layout = f"{answer.pipeline}·{answer.data}{order}, T = {answer.microbatches}, layers {sizes}"
    row = {"planner": answer.planner, "layout": layout, "own_seconds": answer.seconds}
    if answer.needs:
        return row | {"why_not": answer.needs[0]}
    held = [0] * min(len(answer.stages), answer.pipeline)
    for stage, (first, last) in enumerate(answer.stages):
        held[answer.placement[stage] if answer.placement else stage % len(held)] += last - first + 1
    fits = max(held) <= _FIT
    return row | {"why_not": None, "fits": fits, "judged_seconds": judged(of, answer), "overrides": words(answer)}


def words(answer: PlanningAnswer) -> list[str]:
    """The words of a command line that ask for an answer."""
    keys = answer.overrides({name: spec.default_chunks for name, spec in SPECS.items()})
    made = {key: value for key, value in keys.items() if value is not None}
    return [f"{key}={str(value).replace(' ', '')}" for key, value in made.items()]


def measure(row: Mapping[str, Any], folder: Path, seconds: Sequence[float] = SECONDS) -> float:
    """Seconds of a step of a row's layout, in median, of a run on this machine.

    Args:
        row: has the words that ask for it, ``overrides``.
        folder: of the run.
        seconds: of a forward for each sample, by layer.
    """
    record = train(folder, *sleeping_words(seconds), *row["overrides"]).record
    return float(record["step_seconds"]["median"])


def sleeping_words(seconds: Sequence[float]) -> tuple[str, ...]:
    """The words of a short run of layers that sleep so many seconds in a forward of each sample."""
    sizes = ",".join(map(str, seconds))
    model = "model=custom", "model.target=runner.recipes.planners.models:sleeping", f"+model.kwargs.seconds=[{sizes}]"
    data = "data=custom", "data.target=runner.recipes.planners.models:numbers", f"data.batch_size={_BATCH}"
    quiet = "loss=mse", "device=cpu", "logger=none", "trainer.progress=false", "checkpoint=none"
    return (*model, *data, *quiet, f"trainer.max_steps={_STEPS}")
