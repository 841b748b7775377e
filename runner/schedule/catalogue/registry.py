"""Finds schedules by name and makes them for a request."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from itertools import chain
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.options import Option, owners_by_key, shown
from runner.schedule import generators
from runner.schedule.catalogue.own import own_spec
from runner.schedule.generators.auto import auto_spec
from runner.schedule.kinds import Formulas, Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.simulation.clock import Costs, StageCosts
from runner.schedule.values import Schedule

__all__ = [
    "ALIASES",
    "NAMES",
    "OPTIONS",
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

OPTIONS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    owners_by_key({name: spec.options for name, spec in SPECS.items()})
)
"""The keys that only some schedules read -> what each means for its schedules, by their names."""

ALIASES: Mapping[str, str] = MappingProxyType({"dapple": "1f1b"})
"""Other names of schedules: alias -> name."""

NAMES: tuple[str, ...] = (*SPECS, *ALIASES)
"""The names that ``schedule=`` accepts."""


_Keys = ParamSpec("_Keys")
_Result = TypeVar("_Result")


def _by_keys(
    use: Callable[[str, ScheduleRequest], _Result], request: Callable[_Keys, ScheduleRequest]
) -> Callable[Concatenate[str, _Keys], _Result]:
    """Make a function that takes the fields and options of a request one by one, and calls ``use`` with it."""

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
        )
        if value is not None and value < 1
    ]
    if spec is None:
        return [_unknown(name), *ranges]
    if ranges:
        return ranges
    if request.ranks == 1 and not spec.one_rank:
        return [_one_rank(spec)]
    foreign = _foreign_keys(spec, request)
    if wrong := list(_wrong_options(spec, request)):
        return [*foreign, *wrong]
    shares = _share_problems(request) if "shares" in spec.keys else ()
    found = [*foreign, *shares, *_illegal(spec, request)]
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


def _request(
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    *,
    costs: Costs | StageCosts | None = None,
    target: str | None = None,
    kwargs: Mapping[str, object] | None = None,
    **options: Any,
) -> ScheduleRequest:
    if unknown := [key for key in options if key not in OPTIONS]:
        raise TypeError(f"no schedule has the key {unknown[0]}")
    given = {key: value for key, value in options.items() if value is not None}
    return ScheduleRequest(ranks, microbatches, chunks, costs or Costs(), given, target, kwargs or {})


problems_of = _by_keys(request_problems, _request)
build = _by_keys(generate, _request)


def _one_rank(spec: ScheduleSpec) -> Problem:
    accumulating = [name for name, each in SPECS.items() if each.one_rank and each.kind == "synchronous"]
    why = f"One rank has no pipeline to order; {', '.join(accumulating)} mean accumulation there"
    rule = f"must be at least 2 for schedule={spec.name}"
    return Problem("parallelism.pipeline", 1, rule, why, f"schedule={accumulating[-1]}")


def _foreign_keys(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    """The problems of keys that are set but that this schedule does not use."""
    problems = []
    for key, owners in OPTIONS.items():
        value, path = request.option(key), f"schedule.{key}"
        if value is not None and key not in spec.keys:
            why = next(iter(owners.values())).elsewhere
            rule = f"applies to schedule={' or '.join(owners)} only"
            problems.append(Problem(path, shown(value), rule, why, f"{path}=null"))
    return problems


def _wrong_options(spec: ScheduleSpec, request: ScheduleRequest) -> Iterator[Problem]:
    """The problems of values that break the rules of the schedule's own keys."""
    for option in spec.options:
        value = request.option(option.key)
        if value is not None and (problem := option.problem(value, f"schedule.{option.key}")) is not None:
            yield problem


def _share_problems(request: ScheduleRequest) -> Iterator[Problem]:
    """The problems of the shares of micro-batches."""
    shares = request.option("shares")
    if shares is None:
        return
    given, count = shown(shares), request.microbatches
    fix = f"schedule.shares=[{','.join(['1'] * count)}]"
    if not all(0 < each < math.inf for each in shares):
        why = "They are parts of a step's samples, in any unit"
        yield Problem("schedule.shares", given, "must be positive numbers", why, fix)
    elif len(shares) != count:
        rule = f"must be one number for each of schedule.microbatches={count}"
        why = f"These are {len(shares)} shares"
        yield Problem("schedule.shares", given, rule, why, f"schedule.microbatches={max(len(shares), 1)}")
    elif max(request.option("replicas") or (1,)) > 1:
        why = "Ranks that take micro-batches of several sizes in turns have no published order"
        yield Problem("schedule.shares", given, "must be null with schedule.replicas", why, "schedule.shares=null")


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
