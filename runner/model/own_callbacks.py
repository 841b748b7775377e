"""What a Lightning callback may not be or do in a run, found out without importing Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from runner.errors import Problem
from runner.model.own_methods import brings, is_lightnings

__all__ = ["callback_problems"]

_SAVES = "It would save beside the run's own checkpoints, which continue in any layout"
_COPIES = "It copies or changes the whole module, of which each rank has its stages"
_TRIES = "It trains several times, and takes the run's own state back"
_REFUSED = {  # Lightning's classes
    "ModelCheckpoint": (_SAVES, "checkpoint=best"),
    "OnExceptionCheckpoint": (_SAVES, "checkpoint=every"),
    "GradientAccumulationScheduler": ("The schedule accumulates", "schedule.microbatches=2"),
    "StochasticWeightAveraging": (_COPIES, "trainer.ema_decay=0.999"),
    "WeightAveraging": (_COPIES, "trainer.ema_decay=0.999"),
    "ModelPruning": (_COPIES, ""),
    "BaseFinetuning": (_COPIES, ""),
    "BatchSizeFinder": (_TRIES, ""),
    "LearningRateFinder": (_TRIES, ""),
    "ProgressBar": ("The run has one line for all ranks", "trainer.progress=true"),
}
_UNCALLED = ("on_before_backward", "on_after_backward")


def callback_problems(made: Any, path: str, target: str) -> Iterator[Problem]:
    """Problems with a callback of a user.

    Args:
        made: the callback.
        path, target: the key that names it, and its value.
    """
    for kind in (base.__name__ for base in type(made).__mro__ if is_lightnings(base)):
        if kind in _REFUSED:
            why, fix = _REFUSED[kind]
            yield Problem(path, target, "cannot be used in a run", why, fix)
    for hook in _UNCALLED:
        if brings(made, hook):
            why = "The engine runs the backwards of all micro-batches within the optimizer step"
            fix = "on_before_optimizer_step, which finds the gradients of the step"
            yield Problem(path, target, f"must not define {type(made).__name__}.{hook}, which is not called", why, fix)
