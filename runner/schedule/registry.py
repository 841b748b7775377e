"""Schedules by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from runner.errors import Problem, RequestError, did_you_mean
from runner.schedule.catalogue import CATALOGUE
from runner.schedule.simulate import Costs, StageCosts
from runner.schedule.specs import Formulas, Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.values import Schedule

__all__ = [
    "ALIASES",
    "NAMES",
    "NOT_AVAILABLE",
    "SPECS",
    "Formulas",
    "ScheduleRequest",
    "ScheduleSpec",
    "build",
    "not_available",
    "problems_of",
]

SPECS: Mapping[str, ScheduleSpec] = MappingProxyType({spec.name: spec for spec in CATALOGUE})
"""The schedules of this version."""

ALIASES: Mapping[str, str] = MappingProxyType({"dapple": "1f1b"})
"""Other names, each with the schedule it means."""

NOT_AVAILABLE = frozenset(
    {
        "bpipe",
        "pipefisher",
        "pipefb",
        "ampnet",
        "pipedream",
        "pipedream_vsync",
        "pipedream_2bw",
        "wpipe",
        "spectrain",
        "xpipe",
        "pipemare",
        "avgpipe",
        "hetpipe",
    }
)
"""Schedules that the public contract names and this version does not have."""

NAMES: tuple[str, ...] = (*SPECS, *ALIASES)
"""What ``schedule=`` accepts."""


def problems_of(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    file: str | None = None,
    memory_limit: int | None = None,
    costs: Costs | StageCosts | None = None,
    variant: str | None = None,
    pipes: int | None = None,
) -> list[Problem]:
    """Everything that is wrong with such a request, see :class:`ScheduleRequest`. Never raises."""
    request = ScheduleRequest(ranks, microbatches, chunks, file, memory_limit, costs or Costs(), variant, pipes)
    spec = SPECS.get(ALIASES.get(name, name))
    ranges = [
        Problem(path, value, "must be at least 1", fix=f"{path}=1")
        for path, value in (
            ("parallelism.pipeline", ranks),
            ("schedule.microbatches", microbatches),
            ("schedule.chunks", 1 if chunks is None else chunks),
            ("schedule.memory_limit", 1 if memory_limit is None else memory_limit),
            ("schedule.pipes", 1 if pipes is None else pipes),
        )
        if value < 1
    ]
    if spec is None:
        return [_unknown(name), *ranges]
    if ranges:
        return ranges
    if ranks == 1 and not spec.one_rank:
        return [_one_rank(spec)]
    return [*_foreign_keys(spec, request), *_illegal(spec, request), *spec.constraint(request)]


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    file: str | None = None,
    memory_limit: int | None = None,
    costs: Costs | StageCosts | None = None,
    variant: str | None = None,
    pipes: int | None = None,
) -> Schedule:
    """The schedule of that name; one of ``NAMES``. The other arguments are those of :class:`ScheduleRequest`.

    Raises:
        RequestError: with everything that :func:`problems_of` finds.
    """
    costs = costs or Costs()
    problems = problems_of(
        name,
        ranks=ranks,
        microbatches=microbatches,
        chunks=chunks,
        file=file,
        memory_limit=memory_limit,
        costs=costs,
        variant=variant,
        pipes=pipes,
    )
    if problems:
        raise RequestError(problems)
    spec = SPECS[ALIASES.get(name, name)]
    return spec.generate(ScheduleRequest(ranks, microbatches, chunks, file, memory_limit, costs, variant, pipes))


def _one_rank(spec: ScheduleSpec) -> Problem:
    accumulating = [name for name, each in SPECS.items() if each.one_rank]
    why = f"One rank has no pipeline to order; {', '.join(accumulating)} mean accumulation there"
    rule = f"must be at least 2 for schedule={spec.name}"
    return Problem("parallelism.pipeline", 1, rule, why, f"schedule={accumulating[-1]}")


def _foreign_keys(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    """Keys that are set and that this schedule does not look at."""
    asked = (
        ("schedule.file", request.file, "from_file", "The order of the other schedules is generated"),
        ("schedule.memory_limit", request.memory_limit, "zb_auto or auto", "The order of the other schedules is fixed"),
        ("schedule.variant", request.variant, "chimera", "The other schedules have one form"),
        ("schedule.pipes", request.pipes, "chimera", "The other schedules have as many pipelines as they need"),
    )
    return [
        Problem(path, value, f"applies to schedule={owner} only", why, f"{path}=null")
        for path, value, owner, why in asked
        if value is not None and spec.name not in owner.split(" or ")
    ]


def _illegal(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    """Ranks, chunks and micro-batches for which there is no such order, each with the nearest that there is."""
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


def _nearest(legal: Legal, ranks: int, value: int) -> list[int]:
    """The next legal value below and above, as far as there are any."""
    below = next((each for each in range(value - 1, 0, -1) if legal.holds(ranks, each)), None)
    above = next((each for each in range(value + 1, 2 * (value + ranks) + 1) if legal.holds(ranks, each)), None)
    return [each for each in (below, above) if each is not None]


def not_available(name: str) -> Problem:
    """What stands against one of ``NOT_AVAILABLE``."""
    why = f"The name is reserved for that published schedule; this version has {', '.join(NAMES)}"
    return Problem("schedule", name, "is not available in this version", why, "schedule=1f1b")


def _unknown(name: str) -> Problem:
    if name in NOT_AVAILABLE:
        return not_available(name)
    choices = ", ".join(NAMES)
    near = did_you_mean(name, (*NAMES, *sorted(NOT_AVAILABLE)))
    if near in NOT_AVAILABLE:
        why = f"Nearest is {near}, which is not available in this version"
        return Problem("schedule", name, f"must be one of {choices}", why, "schedule=1f1b")
    why = f"Did you mean {near}" if near else ""
    return Problem("schedule", name, f"must be one of {choices}", why, f"schedule={near}" if near else "")
