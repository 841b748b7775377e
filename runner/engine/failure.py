"""Explains where an action failed, with a picture of the schedule."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.engine.rank_view import RankView
from runner.errors import RunFailedError, RunnerError
from runner.model.layers import StageModule
from runner.model.out_of_range import out_of_range
from runner.schedule.simulation.clock import Costs
from runner.schedule.values import COMPUTE, Action, Op, Payload, Program

__all__ = ["describe_place", "draw_place", "explain_failure"]

_MOST_MICROBATCHES_DRAWN = 32
_OP_OF_PAYLOAD = {Payload.ACTIVATION: Op.F, Payload.GRADIENT: Op.B, Payload.STASH: Op.F}
_CHANGED = (
    "the forward of another micro-batch may have changed a buffer that this backward reads; a forward can read it as "
    "buffer.clone(), and schedule.microbatches=1 has one micro-batch alone"
)
_PACKAGE = str(Path(__file__).parents[1])


def explain_failure(
    error: Exception,
    program: Program,
    view: RankView,
    action: Action,
    buffers: str,
    stages: Mapping[int, StageModule],
) -> Exception:
    """The error to raise instead of ``error``; it shows the action, the stage's layers, its buffers and the schedule.

    Errors that explain themselves are returned unchanged, and so are out-of-memory errors, which callers know by type.
    """
    import torch

    if isinstance(error, RunnerError | torch.OutOfMemoryError | MemoryError):
        return error
    rank = view.pipeline[view.position]
    known = out_of_range(error, stages.get(action.stage))
    if known is None and "modified by an inplace operation" in str(error):
        known = _CHANGED
    what = f"{error}: {known}" if known is not None else str(error)
    lines = [
        f"{action} failed on rank {rank} {_held(action, stages)}: {type(error).__name__}: {what}{_where(error)}",
        f"its buffers: {buffers}",
        draw_place(program, view, action),
    ]
    return RunFailedError("\n".join(line for line in lines if line))


def describe_place(action: Action, stages: Mapping[int, StageModule]) -> str:
    """An action in words: ``0F2 (stage 0, layers 0..1)``."""
    return f"{action} {_held(action, stages)}"


def draw_place(program: Program, view: RankView, action: Action) -> str:
    """The schedule with an action's cell marked; empty if the schedule is too large to read."""
    from runner.schedule.render.text import to_text

    if program.schedule.microbatches > _MOST_MICROBATCHES_DRAWN:
        return ""
    cell = _cell(program.schedule.actions[view.position], action)
    return to_text(program.schedule, Costs(), mark=(view.position, cell))


def _held(action: Action, stages: Mapping[int, StageModule]) -> str:
    module = stages.get(action.stage)
    first = module.first_layer if module else 0
    last = first + len(module.layers) - 1 if module else 0
    return f"(stage {action.stage}, layers {first}..{last})"


def _cell(row: Sequence[Action], action: Action) -> int:
    """The cell of a rank's row in which the picture shows ``action``.

    A message is shown at the compute that makes or takes it, a reduction and a step at the last compute of their
    stage, and an action for a stage of another rank at the rank's last compute.
    """
    of_stage = [cell for cell, other in enumerate(row) if other.stage == action.stage]
    op = action.op if action.op in COMPUTE else _OP_OF_PAYLOAD[action.payload] if action.payload else None
    found = [cell for cell in of_stage if row[cell].op is op and row[cell].microbatch == action.microbatch]
    return (found or of_stage or [len(row) - 1])[-1]


def _where(error: Exception) -> str:
    """The innermost frame of the user's own code, or an empty text if the failure has none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith(("<", _PACKAGE))]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name})" if own else ""
