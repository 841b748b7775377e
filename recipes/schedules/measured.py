"""Bubbles measured: processes whose stages sleep, so that any machine has a core for each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runner.recipes.benchmarks.pipelines import Pipeline, RunnerPipeline
from runner.recipes.benchmarks.processes import run_ranks
from runner.recipes.benchmarks.rounds import Seconds, take_turns
from runner.recipes.benchmarks.sleeping_stages import SleepingLayer, mean_square, sleeping_batch
from runner.recipes.benchmarks.two_stages import require_equal, shared_losses
from runner.recipes.schedules.computed import compute
from runner.recipes.schedules.rows import ROWS, Row

__all__ = ["STEPS_IN_A_ROW", "bubble", "in_turns", "measure"]

STEPS_IN_A_ROW = 10
_IN_A_ROW = " in a row"


def measure(
    ranks: int, *, microbatches: int, seconds: float, rounds: int, rows: Sequence[Row] = ROWS
) -> dict[str, dict[str, float]]:
    """Seconds per optimizer step by row, in median, with a barrier after each and, where that helps, without.

    Args:
        ranks: processes.
        seconds: that a rank's share of a forward sleeps, and as long for each of its gradients.
        rounds: turns of each that count.

    Raises:
        RuntimeError: two schedules do not compute the same losses.
    """
    run = partial(_as_rank, microbatches=microbatches, seconds=seconds, rounds=rounds, rows=rows)
    taken: Seconds = run_ranks(ranks, run)
    found: dict[str, dict[str, float]] = {}
    for name, values in taken.items():
        label = name.removesuffix(_IN_A_ROW)
        kind = "in_a_row" if name.endswith(_IN_A_ROW) else "flushed"
        found.setdefault(label, {})[kind] = median(values)
    return found


def bubble(busy: float, seconds_of_unit: float, seconds_of_step: float) -> float:
    """Idle / total rank time of a step; what the engine itself takes counts as idle.

    Args:
        busy: units under compute, mean over the ranks.
    """
    return 1.0 - busy * seconds_of_unit / seconds_of_step


def _as_rank(*, microbatches: int, seconds: float, rounds: int, rows: Sequence[Row]) -> Seconds:
    ranks = dist.get_world_size()
    sgd: Callable[[Sequence[Tensor]], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.01)
    batch = sleeping_batch(2 * microbatches)  # so that a micro-batch has two halves

    def pipeline(row: Row, **options: Any) -> RunnerPipeline:
        schedule = row.build(ranks, microbatches)
        each = seconds / (row.chunks * schedule.parts)
        layers = [SleepingLayer(each) for _ in range(row.chunks * ranks)]
        return RunnerPipeline(layers, mean_square, sgd, microbatches, schedule=schedule, **options)

    flushed = {row.label: pipeline(row) for row in rows}
    without = {
        row.label + _IN_A_ROW: pipeline(row, post_validation=True)
        for row in rows
        if compute(row, ranks, microbatches).gains_in_a_row
    }
    require_equal({name: shared_losses(one.step(batch)) for name, one in (flushed | without).items()})
    return in_turns(flushed, without, batch, rounds=rounds, meet=dist.barrier)


def in_turns(
    flushed: Mapping[str, Pipeline],
    without: Mapping[str, RunnerPipeline],
    batch: tuple[Tensor, Tensor],
    *,
    rounds: int,
    meet: Callable[[], object],
) -> Seconds:
    """Seconds per step of each contestant in each round.

    Args:
        flushed: a turn of these is one step.
        without: a turn of these is several steps without a barrier in between. They take their turns among the others:
            when they were measured once, at the end, what slowed the machine down in that time was theirs alone.
        rounds, meet: see :func:`take_turns`.
    """
    turns: dict[str, Callable[[], object]] = {name: partial(one.step, batch) for name, one in flushed.items()}
    turns |= {name: partial(_steps, one, batch) for name, one in without.items()}
    taken = take_turns(turns, warm_rounds=0, rounds=rounds, steps=1, meet=meet)
    for name in without:
        taken[name] = [whole / STEPS_IN_A_ROW for whole in taken[name]]
    return taken


def _steps(pipeline: RunnerPipeline, batch: tuple[Tensor, Tensor]) -> None:
    for _ in range(STEPS_IN_A_ROW):
        pipeline.step(batch)
    pipeline.engine.drain()
