"""The layouts in which the campaign's job runs, and its two forms of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMS", "LAYOUTS", "MAX_STEPS", "Layout", "overrides"]

MAX_STEPS = 40
"""Steps of every run: faults come after a few steps each, and a run must not end before them."""
_EVERY = 2


@dataclass(frozen=True, slots=True)
class Layout:
    """A request.

    Args:
        ranks: how many processes train.
        words: its overrides.
        actions: the engine's actions that its ranks do.
        replicas: whether several ranks hold copies of the same weights.
        workers: whether loader workers read the samples.
    """

    ranks: int
    words: tuple[str, ...]
    actions: tuple[str, ...]
    replicas: bool = False
    workers: bool = False


_WHOLE, _MESSAGES = ("F", "B", "STEP"), ("SEND", "RECV")
_SPLIT = ("F", "I", "W", "STEP")
LAYOUTS = {
    "single": Layout(1, ("data.workers=1",), _WHOLE, workers=True),
    "1f1b": Layout(2, ("schedule=1f1b", "parallelism.pipeline=2"), (*_WHOLE, *_MESSAGES)),
    "zb_v": Layout(2, ("schedule=zb_v", "parallelism.pipeline=2"), (*_SPLIT, *_MESSAGES)),
    "1f1b x data": Layout(
        4,
        ("schedule=1f1b", "parallelism.pipeline=2", "parallelism.data=2"),
        (*_WHOLE, *_MESSAGES, "REDUCE"),
        replicas=True,
    ),
    "chimera": Layout(
        2, ("schedule=chimera", "parallelism.pipeline=2"), (*_WHOLE, *_MESSAGES, "REDUCE"), replicas=True
    ),
    "zero 1": Layout(2, ("parallelism.data=2", "zero.stage=1"), _WHOLE, replicas=True),
}
FORMS = {"whole": ("checkpoint.asynchronous=false",), "in parts": ("checkpoint.asynchronous=true",)}


def overrides(layout: str, form: str, patience: float) -> list[str]:
    """The words of a request after ``runner train``, without its directory.

    Args:
        layout, form: names of :data:`LAYOUTS` and :data:`FORMS`.
        patience: factor on all limits of time, for a machine that is busy with something else.
    """
    seconds = {
        "launcher.step_timeout_seconds": 5,
        "launcher.watchdog_seconds": 4,
        "launcher.start_timeout_seconds": 30,
        "launcher.exit_timeout_seconds": 5,
        "launcher.rendezvous_timeout_seconds": 15,
        "launcher.grace_seconds": 10,
        "checkpoint.timeout_seconds": 6,
    }
    return [
        *("model=custom", "model.target=runner.recipes.faults.job:model"),
        *("data=custom", "data.target=runner.recipes.faults.job:data", "loss=mse", "data.batch_size=8"),
        *("schedule.microbatches=2", "partition=uniform", "optimizer.lr=0.01", "logger=csv", "device=cpu"),
        *(f"trainer.max_steps={MAX_STEPS}", "trainer.val_every=3", "trainer.progress=false"),
        *(f"checkpoint.every={_EVERY}", "checkpoint.keep=3", "schedule.twin_check_every=1", "data.check_every=1"),
        *(f"{key}={value * patience:g}" for key, value in seconds.items()),
        *LAYOUTS[layout].words,
        *FORMS[form],
    ]
