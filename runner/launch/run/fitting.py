"""A layout that fits, for a request that does not: the search of ``parallelism=auto`` with the request's other keys."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from runner.config.compose.resolve import resolve
from runner.config.schema import RunConfig
from runner.config.units import format_bytes
from runner.errors import Problem, RequestError
from runner.launch.run.find_layout import AUTO, asked_problem, asks_for_layout

if TYPE_CHECKING:
    from runner.plan.planners.choose import Choice

__all__ = ["with_layout_that_fits"]

_TIMES = (1, 2, 4, 8)  # the ranks of the request that are looked at
_CHOSEN = (  # groups whose keys make way for those of the layout
    "parallelism",
    "schedule",
    "partition",
    "zero",
    "activation_checkpoint",
    "planner",
)


def with_layout_that_fits(
    problems: Sequence[Problem], words: Sequence[str], progress: Callable[[str], None] = lambda line: None
) -> tuple[Problem, ...]:
    """The problems of a plan that does not fit; where no single change helps, a whole layout is searched.

    Args:
        problems: what the plan says.
        words: the command line.
        progress: is told what is done.
    """
    if asks_for_layout(words) or len(problems) != 1 or problems[0].fix or problems[0].path != "memory_limit":
        return tuple(problems)
    (problem,) = problems
    try:
        config = resolve(words)
        if config.hardware.devices:  # which the search does not tell apart
            return tuple(problems)
        found = _fewest_ranks(config, words, progress)
    except RequestError as error:
        told = f"a layout that fits could not be searched: {error.problems[0].line()}"
        return (replace(problem, why=f"{problem.why.rstrip('.')}; {told}"),)
    if found is None:
        return tuple(problems)
    best, request, searched, most, left_out = found
    if best.plan.fits:
        told = f"no single change makes it fit, but a search of {searched} layouts found one that does"
        told = f"{told}, with {format_bytes(best.peak)} of {format_bytes(best.plan.memory_limit_bytes)}"
        return (replace(problem, why=f"{_largest(problem)}; {told}", fix=shlex.join(["runner", "train", *request])),)
    told = f"the search of {searched} layouts of up to {most} ranks found none that fits either"
    nearest = f"the nearest needs {format_bytes(best.peak)}, by {' '.join(request[-len(best.keys) :])}"
    if left_out:
        nearest += f"; not searched were {'; '.join(left_out)}"
    return (replace(problem, why=f"{_largest(problem)}; {told}: {nearest}"),)


def _largest(problem: Problem) -> str:
    return (problem.why or "").partition(";")[0]


def _fewest_ranks(
    config: RunConfig, words: Sequence[str], progress: Callable[[str], None]
) -> tuple[Choice, list[str], int, int, tuple[str, ...]] | None:
    """The best plan of the fewest ranks with which something fits, else the one that lacks least.

    Beside it are its request, how many layouts of how many ranks were looked at, and what was left out.
    """
    from runner.model.device import device_type
    from runner.plan.planners.choose import fewest_ranks_that_fit

    degrees = config.parallelism
    world = degrees.pipeline * degrees.data * degrees.tensor
    kept = [word for word in words if word.lstrip("+~").partition("=")[0].partition(".")[0] not in _CHOSEN]
    most = list(_machines(config, world))[-1]
    more = [AUTO, f"parallelism.ranks={most}"]
    if config.hardware.name == "auto" and device_type(config) == "cpu":
        more.append(f"parallelism.tensor={degrees.tensor}")  # each degree is measured, and none pays on one machine
    _, problem, judge = asked_problem([*kept, *more], progress)
    if problem.microbatches is not None:  # layers see their statistics: what is learned stays that of the request
        problem = replace(problem, microbatches=config.schedule.microbatches * degrees.data)
    counts = [world * times for times in _TIMES if world * times <= most]
    found, searched = fewest_ranks_that_fit(problem, counts, judge.plan, judge.refuses, judge.keys, progress)
    if found is None:
        return None
    return replace(found, plan=judge.typed(found.keys)), judge.words(found.keys), searched, most, problem.left_out


def _machines(config: RunConfig, world: int) -> Iterator[int]:
    """Numbers of ranks that the machines of the request have."""
    from runner.model.device import device_type

    devices = None
    if config.hardware.name != "auto" and config.hardware.devices_per_node is not None and config.launcher.nodes:
        devices = config.hardware.devices_per_node * config.launcher.nodes
    elif config.hardware.name == "auto" and device_type(config) == "cuda":
        import torch

        devices = torch.cuda.device_count()
    for times in _TIMES:
        if times == 1 or devices is None or world * times <= devices:
            yield world * times
