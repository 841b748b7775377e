"""Finds schedules by name and makes them for a request."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import chain
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.schedule import generators
from runner.schedule.catalogue.own import own_spec
from runner.schedule.generators.auto import auto_spec
from runner.schedule.kinds import Formulas, Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = [
    "ALIASES",
    "NAMES",
    "SEARCHED",
    "SPECS",
    "Formulas",
    "ScheduleRequest",
    "ScheduleSpec",
    "build",
    "find_spec",
    "generate",
    "problems_of",
    "request_problems",
]


def _found() -> list[ScheduleSpec]:
    """Collect the entries of all generators; an entry is the ``SPEC`` of a module, or one of its ``SPECS``."""
    entries: list[ScheduleSpec] = []
    for module in pkgutil.walk_packages(generators.__path__, f"{generators.__name__}."):
        found = import_module(module.name)
        entries += [*getattr(found, "SPECS", ()), *([found.SPEC] if hasattr(found, "SPEC") else [])]
    return entries


def _place(entry: ScheduleSpec) -> tuple[int, str]:
    return entry.position, entry.name


_GENERATED = sorted(_found(), key=_place)

SEARCHED: tuple[ScheduleSpec, ...] = tuple(
    spec for spec in _GENERATED if spec.searched and not (spec.by_plan or spec.by_costs or spec.default_chunks is None)
)
"""The published orders among which ``auto`` chooses."""

SPECS: Mapping[str, ScheduleSpec] = MappingProxyType(
    {spec.name: spec for spec in sorted([*_GENERATED, auto_spec(SEARCHED)], key=_place)}
)
"""The entries of all schedules of this version by name, in the order of lists."""

ALIASES: Mapping[str, str] = MappingProxyType({"dapple": "1f1b"})
"""Other names of schedules: alias -> name."""

NAMES: tuple[str, ...] = (*SPECS, *ALIASES)
"""The names that ``schedule=`` accepts."""


_Keys = ParamSpec("_Keys")
_Result = TypeVar("_Result")


def _by_keys(
    use: Callable[[str, ScheduleRequest], _Result], request: Callable[_Keys, ScheduleRequest]
) -> Callable[Concatenate[str, _Keys], _Result]:
    """Make a function that takes the fields of a :class:`ScheduleRequest` one by one, and calls ``use`` with it."""

    def called(name: str, /, *args: _Keys.args, **keys: _Keys.kwargs) -> _Result:
        return use(name, request(*args, **keys))

    return called


def find_spec(name: str, target: str | None = None) -> ScheduleSpec | None:
    """The entry of a schedule; None if there is no schedule with this name.

    Args:
        name: its name, or an alias.
        target: ``package.module:name`` of a user's own schedule, or None.

    Raises:
        RequestError: the target cannot be imported, or is neither an entry nor a function.
    """
    return own_spec(name, target) if target is not None else SPECS.get(ALIASES.get(name, name))


def request_problems(name: str, request: ScheduleRequest) -> list[Problem]:
    """All problems of a request; this function never raises."""
    try:
        spec = find_spec(name, request.target)
    except RequestError as error:
        return list(error.problems)
    ranges = [
        Problem(path, value, "must be at least 1", fix=f"{path}=1")
        for path, value in (
            ("parallelism.pipeline", request.ranks),
            ("schedule.microbatches", request.microbatches),
            ("schedule.chunks", request.chunks),
            ("schedule.memory_limit", request.memory_limit),
            ("schedule.pipes", request.pipes),
        )
        if value is not None and value < 1
    ]
    if spec is None:
        return [_unknown(name), *ranges]
    if ranges:
        return ranges
    if request.ranks == 1 and not spec.one_rank:
        return [_one_rank(spec)]
    found = [*_foreign_keys(spec, request), *_share_problems(request), *_illegal(spec, request)]
    return found if any(each.path == "schedule.shares" for each in found) else [*found, *spec.constraint(request)]


def generate(name: str, request: ScheduleRequest) -> Schedule:
    """Make the schedule of a request.

    Args:
        name: one of ``NAMES``, or any name if the request has a target.
        request: the request.

    Raises:
        RequestError: the request has problems; the error contains all that :func:`request_problems` finds.
    """
    raise_problems(request_problems(name, request))
    spec = find_spec(name, request.target)
    assert spec is not None  # it has no problems
    return spec.generate(request)


problems_of = _by_keys(request_problems, ScheduleRequest)
build = _by_keys(generate, ScheduleRequest)


def _one_rank(spec: ScheduleSpec) -> Problem:
    accumulating = [name for name, each in SPECS.items() if each.one_rank and each.kind == "synchronous"]
    why = f"One rank has no pipeline to order; {', '.join(accumulating)} mean accumulation there"
    rule = f"must be at least 2 for schedule={spec.name}"
    return Problem("parallelism.pipeline", 1, rule, why, f"schedule={accumulating[-1]}")


_OWN_KEYS = {
    "file": "The order of the other schedules is generated",
    "memory_limit": "The order of the other schedules is fixed",
    "variant": "The other schedules have one form",
    "opportunistic": "The other schedules are run in their order",
    "base": "The other schedules stand on none",
    "lr_rescheduling": "It belongs to a published way to bear late gradients, of one schedule",
    "discrepancy_correction": "It belongs to a published way to bear late gradients, of one schedule",
    "warmup_steps": "It belongs to a published way to bear late gradients, of one schedule",
    "advance": "The warm-up of the other schedules is fixed",
    "wave": "The replicas of the other schedules sum their gradients in every step",
    "distance": "The replicas of the other schedules sum their gradients in every step",
    "elasticity": "The weights of the other schedules are not averaged",
    "pipes": "The other schedules have as many pipelines as they need",
    "replicas": "The other schedules have an order for stages on one rank each",
    "shares": "The other schedules have an order for micro-batches of one size",
}
"""The keys that only some schedules use -> the reason why the others do not."""


def _foreign_keys(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    """The problems of keys that are set but that this schedule does not use."""
    problems = []
    for key, why in _OWN_KEYS.items():
        value, path = getattr(request, key), f"schedule.{key}"
        if value is not None and key not in spec.keys:
            owners = " or ".join(each.name for each in SPECS.values() if key in each.keys)
            shown = f"[{','.join(f'{each:g}' for each in value)}]" if isinstance(value, list) else value
            problems.append(Problem(path, shown, f"applies to schedule={owners} only", why, f"{path}=null"))
    return problems


def _share_problems(request: ScheduleRequest) -> Iterator[Problem]:
    """The problems of the shares of micro-batches."""
    if request.shares is None:
        return
    shown, count = f"[{','.join(f'{each:g}' for each in request.shares)}]", request.microbatches
    fix = f"schedule.shares=[{','.join(['1'] * count)}]"
    if not all(0 < each < math.inf for each in request.shares):
        why = "They are parts of a step's samples, in any unit"
        yield Problem("schedule.shares", shown, "must be positive numbers", why, fix)
    elif len(request.shares) != count:
        rule = f"must be one number for each of schedule.microbatches={count}"
        why = f"These are {len(request.shares)} shares"
        yield Problem("schedule.shares", shown, rule, why, f"schedule.microbatches={max(len(request.shares), 1)}")
    elif max(request.replicas or (1,)) > 1:
        why = "Ranks that take micro-batches of several sizes in turns have no published order"
        yield Problem("schedule.shares", shown, "must be null with schedule.replicas", why, "schedule.shares=null")


def _illegal(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    """The problems of ranks, chunks and micro-batches for which the schedule does not exist; they name near values."""
    if not spec.ranks.holds(request.ranks, request.ranks):
        near = _nearest(spec.ranks, request.ranks, request.ranks)
        path, why = "parallelism.pipeline", f"There is no {spec.name} of {request.ranks} ranks; {_choices(near)}"
        return [Problem(path, request.ranks, f"must be {spec.ranks.rule}", why, f"{path}={near[0]}")]
    asked = (
        ("schedule.chunks", spec.default_chunks if request.chunks is None else request.chunks, spec.chunks),
        ("schedule.microbatches", request.microbatches, spec.microbatches),
    )
    problems = []
    for path, value, legal in asked:
        if value is None or legal.holds(request.ranks, value):
            continue
        near = _nearest(legal, request.ranks, value)
        ranks = "one rank" if request.ranks == 1 else f"{request.ranks} ranks"
        why = f"There is no other {spec.name} of {ranks}; {_choices(near)}"
        problems.append(Problem(path, value, f"must be {legal.rule}", why, f"{path}={near[0]}"))
    return problems


def _choices(near: list[int]) -> str:
    return f"nearest {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}"


_REACH = 4096
"""How far from a value, and from 1, legal ones are looked for: somebody may have asked for a thousand million."""


def _nearest(legal: Legal, ranks: int, value: int) -> list[int]:
    """The next legal values below and above ``value``, if they exist."""
    reach = _REACH + 2 * ranks
    downward = chain(range(value - 1, max(value - reach, 0), -1), range(min(value - reach, reach), 0, -1))
    below = next((each for each in downward if legal.holds(ranks, each)), None)
    above = next((each for each in range(value + 1, value + reach) if legal.holds(ranks, each)), None)
    return [each for each in (below, above) if each is not None]


def _unknown(name: str) -> Problem:
    choices = ", ".join(NAMES)
    near = did_you_mean(name, NAMES)
    why = f"Did you mean {near}" if near else ""
    return Problem("schedule", name, f"must be one of {choices}", why, f"schedule={near}" if near else "")
