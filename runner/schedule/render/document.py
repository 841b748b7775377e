"""The JSON document of ``runner schedule --json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from runner.schedule.render.table import cells
from runner.schedule.simulation.clock import Costs, simulate
from runner.schedule.stream import updates, versions_held
from runner.schedule.values import Op, Schedule

__all__ = ["filling_document", "to_json"]


def to_json(schedule: Schedule, costs: Costs, *, period: float | None = None) -> dict[str, Any]:
    """Everything about ``schedule`` that another program may need, in plain lists and numbers.

    An entry ``[stage, window, index]`` of ``updates`` is an optimizer step that comes before ``index`` of the rank's
    actions. A move ``[stage, micro-batch, rank]`` is a micro-batch whose activations that rank keeps for a while.
    ``versions`` contains, for each micro-batch and stage, the version of the weights that its forward and its backward
    read. If work fills the bubbles, ``refresh_interval`` is the number of steps in which all of it is done once, and
    ``utilisation`` contains the share of time in which ranks are busy, with this work and without it.
    ``steady_bubble_ratio`` is null if ``period`` is not given.

    Args:
        schedule: one optimizer step, or a stream of several.
        costs: its durations.
        period: time from one optimizer step to the next in the steady state of the stream, or None.
    """
    times = simulate(schedule, costs)
    busy = sum(times.busy) / schedule.windows
    asked = range(0, schedule.microbatches, schedule.parts)  # the first part of each micro-batch
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": len(asked),
        "chunks": schedule.chunks,
        "placement": [list(row) for row in schedule.placement],
        **({"backward_placement": list(schedule.backward_placement)} if schedule.backward_placement else {}),
        "pipeline_of_microbatch": [schedule.pipeline_of_microbatch[m] for m in asked],
        "window_of_microbatch": [schedule.window_of(m) for m in asked],
        "actions": [cells(schedule, row) for row in schedule.actions],
        **({"moves": [[one.stage, one.microbatch, one.peer] for one in schedule.moves]} if schedule.moves else {}),
        "costs": _costs(schedule, costs),
        "makespan": times.makespan,
        "bubble_ratio": times.bubble_ratio,
        **filling_document(schedule, times.bubble_ratio, times.utilisation_without_fills),
        "steady_bubble_ratio": 1.0 - busy / (schedule.ranks * period) if period else None,
        "inner_idle": list(times.inner_idle),
        "peak_activations": list(times.peak_activations),
        "weight_versions": list(versions_held(schedule)),
        "updates": [[list(update) for update in row] for row in updates(schedule)],
        "versions": {op.name: _versions(schedule, asked, op) for op in (Op.F, Op.B)},
    }


def _versions(schedule: Schedule, microbatches: Iterable[int], op: Op) -> list[list[int]]:
    """Per micro-batch and stage, the version of the weights that ``op`` reads; empty without backwards."""
    if op is Op.B and not schedule.backward:
        return []
    return [[schedule.version_read(stage, m, op) for stage in range(schedule.stages)] for m in microbatches]


def _costs(schedule: Schedule, costs: Costs) -> dict[str, float]:
    fills = schedule.filling.kinds if schedule.filling is not None else ()
    plain = {name: getattr(costs, name) for name in ("F", "B", "I", "W", "comm")}
    return plain | {kind.cost: costs.of_fill(kind) for kind in fills}


def filling_document(schedule: Schedule, bubble_ratio: float, without: float) -> dict[str, Any]:
    """The part of the document about fills: the steps until all are done, and the share of time that ranks are busy.

    Args:
        schedule: any schedule; without fills, the document is empty.
        bubble_ratio: idle time / total time of all ranks.
        without: share of the ranks' time in other work than fills.
    """
    if schedule.filling is None:
        return {}
    shares = {f"with_{schedule.filling.key}": 1.0 - bubble_ratio, "without": without}
    return {"refresh_interval": schedule.windows, "utilisation": shares}
