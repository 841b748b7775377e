"""A schedule of the user's own, named by ``schedule.target``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from runner.errors import Problem, RequestError
from runner.schedule.checking.schedule import check, why_of
from runner.schedule.generators.one_directional.from_file import schedule_of_rows
from runner.schedule.kinds import Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule
from runner.targets import call_named, import_named

__all__ = ["own_spec"]

_PATH = "schedule.target"
_ANY = Legal("what the target makes", lambda ranks, value: True)


def own_spec(name: str, target: str) -> ScheduleSpec:
    """The entry that ``target`` names, or an entry made from the function that it names.

    Args:
        name: the schedule's name, which replaces the name in the target's entry.
        target: ``package.module:name`` of a :class:`ScheduleSpec` or a function. The function is called with ``ranks``,
            ``microbatches`` and the request's ``kwargs``. It returns each rank's list of cells like ``0F0``, or a
            :class:`runner.schedule.values.Schedule`.

    Raises:
        RequestError: the target cannot be imported, or is neither of the two.
    """

    def fits(found: object) -> bool:
        return isinstance(found, ScheduleSpec) or callable(found)

    found = import_named(_PATH, target, what="function or ScheduleSpec", fits=fits)
    if isinstance(found, ScheduleSpec):
        return replace(found, name=name)

    def generate(request: ScheduleRequest) -> Schedule:
        made = _made(name, target, found, request)
        if isinstance(made, Schedule):
            return made
        raise RequestError(made)

    def problems(request: ScheduleRequest) -> list[Problem]:
        made = _made(name, target, found, request)
        return [] if isinstance(made, Schedule) else made

    return ScheduleSpec(
        name=name,
        description=(found.__doc__ or "").strip().partition("\n")[0],
        source="your own",
        formulas=None,
        generate=generate,
        default_chunks=None,
        ranks=_ANY,
        chunks=_ANY,
        microbatches=_ANY,
        one_rank=True,
        constraint=problems,
        searched=False,
    )


def _made(name: str, target: str, make: Callable[..., Any], request: ScheduleRequest) -> Schedule | list[Problem]:
    """The schedule that a user's function makes for a request, or the problems with it."""
    asked_for = {"ranks": request.ranks, "microbatches": request.microbatches}
    try:
        made = call_named(_PATH, target, make, **asked_for, **request.kwargs)
    except RequestError as error:
        return list(error.problems)
    if not isinstance(made, Schedule):
        if not _are_rows(made):
            why = f"It returned a {type(made).__name__}"
            return [Problem(_PATH, target, "must return each rank's list of cells like 0F0, or a Schedule", why)]
        rows = schedule_of_rows(made, name)
        if not isinstance(rows, Schedule):
            return [replace(problem, path=_PATH, value=target) for problem in rows]
        made = rows
    made = replace(made, name=name)
    if defects := check(made):
        return [Problem(_PATH, target, defect, why_of(defect)) for defect in defects]
    asked = (("ranks", request.ranks, made.ranks), ("micro-batches", request.microbatches, _of_a_window(made)))
    return [
        Problem(_PATH, target, f"must make a schedule of {wanted} {what}", f"It made one of {there}")
        for what, wanted, there in asked
        if wanted != there
    ] or made


def _are_rows(made: object) -> bool:
    if not isinstance(made, Sequence) or isinstance(made, str):
        return False
    return all(
        isinstance(row, Sequence) and not isinstance(row, str) and all(isinstance(cell, str) for cell in row)
        for row in made
    )


def _of_a_window(schedule: Schedule) -> int:
    return schedule.microbatches // (schedule.windows * schedule.parts)
