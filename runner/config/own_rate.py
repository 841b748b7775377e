"""A learning rate of the user's own, named by ``lr_scheduler.target``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from numbers import Real

from runner.config.schema import LrSchedulerConfig, RunConfig
from runner.errors import Problem, RequestError
from runner.targets import call_named, import_named

__all__ = ["own_rate", "own_rate_problems"]

_PATH = "lr_scheduler.target"


def own_rate(section: LrSchedulerConfig, peak: float, total_steps: int) -> Callable[[int], float]:
    """The user's function from the step (0, 1, …) to its learning rate.

    It is called with ``step``, ``total_steps``, ``peak`` and the request's ``kwargs``; never for a step behind the last
    one of the run, for which torch's scheduler asks when all is done.

    Args:
        section: the section, whose ``target`` names the function.
        peak: ``optimizer.lr``, scaled with the batch size if ``base_batch`` is given.
        total_steps: the number of steps of the run, unless the section has its own.

    Raises:
        RequestError: the function cannot be imported. What is returned raises it where the function raises, or returns
            no rate.
    """
    target, total = section.target, section.total_steps or total_steps
    assert target is not None
    function = import_named(_PATH, target)

    def rate(step: int) -> float:
        step = min(step, max(total_steps - 1, 0))
        given = call_named(_PATH, target, function, step=step, total_steps=total, peak=peak, **section.kwargs)
        value = float(given) if isinstance(given, Real) else math.nan
        if not (math.isfinite(value) and value >= 0):
            why = f"At step {step} of {total} it returned {given!r}"
            raise RequestError([Problem(_PATH, target, "must return a finite number, 0 or above", why)])
        return value

    return rate


def own_rate_problems(config: RunConfig) -> Iterator[Problem]:
    """Call the user's function for the first step and the last one, and return what is wrong."""
    if config.lr_scheduler.target is None:
        return
    steps = config.trainer.max_steps
    try:
        rate = own_rate(config.lr_scheduler, config.optimizer.lr, steps)
        rate(0), rate(max(steps - 1, 0))
    except RequestError as error:
        yield from error.problems
