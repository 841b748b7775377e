"""Every schedule by name: what it is, what it asks for, how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from runner.errors import Problem, RequestError, did_you_mean
from runner.schedule.generators.from_file import read_schedule
from runner.schedule.generators.gpipe import gpipe
from runner.schedule.generators.naive import naive
from runner.schedule.generators.one_f_one_b import one_f_one_b
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
    "problems_of",
]


@dataclass(frozen=True, slots=True)
class ScheduleRequest:
    """What a user asks of a schedule. ``chunks`` None means the schedule's own."""

    ranks: int
    microbatches: int
    chunks: int | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class Formulas:
    """Closed forms for D > 1 equal stages and free messages, in Python's notation.

    D ranks, T micro-batches, r the rank, F and B the durations of one stage.
    """

    span: str
    bubble_ratio: str
    peak_activations: str  # on rank r, in micro-batches of its whole share


@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """One schedule.

    Args:
        name: as in ``schedule=NAME``.
        kind: "synchronous": every forward and backward of a step sees the same weights.
        description: one line.
        formulas: None where the order is the user's own.
        source: the paper, or where the order comes from.
        constraint: what a request breaks; ranges and ``chunks`` are checked for all schedules alike.
        default_chunks: model chunks per rank; None where a file says it.
        generate: called with a request without problems.
    """

    name: str
    kind: str
    description: str
    formulas: Formulas | None
    source: str
    default_chunks: int | None
    generate: Callable[[ScheduleRequest], Schedule] = field(repr=False)
    constraint: Callable[[ScheduleRequest], list[Problem]] = field(repr=False)


def _no_file(request: ScheduleRequest) -> list[Problem]:
    if request.file is None:
        return []
    why = "The order of the other schedules is generated"
    return [Problem("schedule.file", request.file, "applies to schedule=from_file only", why, "schedule.file=null")]


def _read(request: ScheduleRequest) -> Schedule | list[Problem]:
    if request.file is None:
        why = "The order is read from it: torch's schedule CSV, one row per rank, cells like 0F0"
        return [Problem("schedule.file", None, "must name a file for schedule=from_file", why, "schedule.file=FILE")]
    return read_schedule(request.file)


def _fits_file(request: ScheduleRequest) -> list[Problem]:
    if request.ranks == 1:
        why = "One rank has no pipeline to order; naive, gpipe and 1f1b mean accumulation there"
        return [Problem("parallelism.pipeline", 1, "must be at least 2 for schedule=from_file", why, "schedule=1f1b")]
    found = _read(request)
    if not isinstance(found, Schedule):
        return found
    chunks = found.chunks if request.chunks is None else request.chunks
    pairs = (
        ("parallelism.pipeline", request.ranks, found.ranks, "ranks"),
        ("schedule.microbatches", request.microbatches, found.microbatches, "micro-batches"),
        ("schedule.chunks", chunks, found.chunks, "chunks per rank"),
    )
    why = f"{request.file} is written for so many"
    return [
        Problem(path, asked, f"must be {held}, the {what} of the file", why, f"{path}={held}")
        for path, asked, held, what in pairs
        if asked != held
    ]


def _generate_from_file(request: ScheduleRequest) -> Schedule:
    found = _read(request)
    if not isinstance(found, Schedule):
        raise RequestError(found)  # the file changed since it was checked
    return found


_PIPELINE_BUBBLE = "(D - 1) / (T + D - 1)"

SPECS: Mapping[str, ScheduleSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            ScheduleSpec(
                name="naive",
                kind="synchronous",
                description="one micro-batch at a time through all ranks and back",
                formulas=Formulas("T * D * (F + B)", "(D - 1) / D", "1"),
                source="the baseline of every pipeline paper",
                default_chunks=1,
                generate=lambda request: naive(request.ranks, request.microbatches),
                constraint=_no_file,
            ),
            ScheduleSpec(
                name="gpipe",
                kind="synchronous",
                description="all forwards, then all backwards",
                formulas=Formulas("(T + D - 1) * (F + B)", _PIPELINE_BUBBLE, "T"),
                source="Huang et al., GPipe, 2019",
                default_chunks=1,
                generate=lambda request: gpipe(request.ranks, request.microbatches),
                constraint=_no_file,
            ),
            ScheduleSpec(
                name="1f1b",
                kind="synchronous",
                description="one forward, one backward after a short warm-up: gpipe's time with fewer activations",
                formulas=Formulas("(T + D - 1) * (F + B)", _PIPELINE_BUBBLE, "min(T, D - r)"),
                source="Fan et al., DAPPLE, 2021; Narayanan et al., PipeDream-Flush, 2021",
                default_chunks=1,
                generate=lambda request: one_f_one_b(request.ranks, request.microbatches),
                constraint=_no_file,
            ),
            ScheduleSpec(
                name="from_file",
                kind="synchronous",
                description="the order written in a file (schedule.file), in torch's schedule CSV",
                formulas=None,
                source="your file",
                default_chunks=None,
                generate=_generate_from_file,
                constraint=_fits_file,
            ),
        )
    }
)
"""The schedules of this version."""

ALIASES: Mapping[str, str] = MappingProxyType({"dapple": "1f1b"})
"""Other names, each with the schedule it means."""

NOT_AVAILABLE = frozenset(
    {
        "1f1b_eager",
        "interleaved_1f1b",
        "looped_bfs",
        "gems",
        "chimera",
        "zb_h1",
        "zb_h2",
        "zb_auto",
        "zb_v",
        "v_half",
        "v_min",
        "dualpipe",
        "dualpipe_v",
        "hanayo",
        "bitpipe",
        "varuna",
        "bpipe",
        "pipefisher",
        "pipefb",
        "auto",
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
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, file: str | None = None
) -> list[Problem]:
    """Everything that is wrong with such a request. Never raises."""
    request = ScheduleRequest(ranks, microbatches, chunks, file)
    spec = SPECS.get(ALIASES.get(name, name))
    ranges = [
        Problem(path, value, "must be at least 1", fix=f"{path}=1")
        for path, value in (
            ("parallelism.pipeline", ranks),
            ("schedule.microbatches", microbatches),
            ("schedule.chunks", 1 if chunks is None else chunks),
        )
        if value < 1
    ]
    if spec is None:
        return [_unknown(name), *ranges]
    if ranges:
        return ranges
    return _wrong_chunks(spec, request) + spec.constraint(request)


def build(name: str, *, ranks: int, microbatches: int, chunks: int | None = None, file: str | None = None) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of ``NAMES``.
        ranks: pipeline ranks.
        microbatches: per optimizer step and data replica.
        chunks: model chunks per rank; None for the schedule's own.
        file: of ``from_file``.

    Raises:
        RequestError: with everything that :func:`problems_of` finds.
    """
    problems = problems_of(name, ranks=ranks, microbatches=microbatches, chunks=chunks, file=file)
    if problems:
        raise RequestError(problems)
    return SPECS[ALIASES.get(name, name)].generate(ScheduleRequest(ranks, microbatches, chunks, file))


def _wrong_chunks(spec: ScheduleSpec, request: ScheduleRequest) -> list[Problem]:
    if spec.default_chunks is None or request.chunks in (None, spec.default_chunks):
        return []
    rule = f"must be {spec.default_chunks} or null for schedule={spec.name}"
    why = "Its ranks hold one contiguous part of the model each"
    return [Problem("schedule.chunks", request.chunks, rule, why, "schedule.chunks=null")]


def _unknown(name: str) -> Problem:
    choices = ", ".join(NAMES)
    if name in NOT_AVAILABLE:
        why = f"The name is reserved for that published schedule; this version has {choices}"
        return Problem("schedule", name, "is not available in this version", why, "schedule=1f1b")
    near = did_you_mean(name, (*NAMES, *sorted(NOT_AVAILABLE)))
    if near in NOT_AVAILABLE:
        why = f"Nearest is {near}, which is not available in this version"
        return Problem("schedule", name, f"must be one of {choices}", why, "schedule=1f1b")
    why = f"Did you mean {near}" if near else ""
    return Problem("schedule", name, f"must be one of {choices}", why, f"schedule={near}" if near else "")
