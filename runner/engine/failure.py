"""An action failed: say where, in the picture of the schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runner.engine.executor import RankView
from runner.errors import RunFailedError, RunnerError
from runner.model.layers import StageModule
from runner.schedule.simulate import Costs
from runner.schedule.values import COMPUTE, Action, Program

__all__ = ["explain_failure"]

_MOST_MICROBATCHES_DRAWN = 32


def explain_failure(
    error: Exception,
    program: Program,
    view: RankView,
    index: int,
    actions: Sequence[Action],
    buffers: str,
    stages: Mapping[int, StageModule],
) -> Exception:
    """The error to raise in place of ``error``: the action, the stage's layers, its buffers, and the grid.

    Errors that explain themselves are kept as they are, and so is running out of memory, which is told apart by type.
    """
    import torch

    from runner.schedule.render.text import to_text

    if isinstance(error, RunnerError | torch.OutOfMemoryError | MemoryError):
        return error
    action = actions[index]
    module = stages.get(action.stage)
    first = module.first_layer if module else 0
    last = first + len(module.layers) - 1 if module else 0
    lines = [
        f"{action} failed on rank {view.pipeline[view.position]} (stage {action.stage}, layers {first}..{last}): "
        f"{type(error).__name__}: {error}",
        f"its buffers: {buffers}",
    ]
    if program.schedule.microbatches <= _MOST_MICROBATCHES_DRAWN:
        cell = sum(1 for done in actions[:index] if done.op in COMPUTE)
        lines.append(to_text(program.schedule, Costs(), mark=(view.position, cell)))
    return RunFailedError("\n".join(lines))
