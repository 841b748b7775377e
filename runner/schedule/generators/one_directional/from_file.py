"""A user's own schedule, read from the CSV format of torch.distributed.pipelining.

There is one row per rank. A cell is ``<stage><op><micro-batch>`` with op F, B, I, W or R (recompute, which torch does
not have). ``0F0+1`` is one forward of two micro-batches, ``0B0.1`` the backward of half of one; torch has neither. A
blank cell is a bubble and has no effect, because only the order in a row counts. Cells in which torch writes
communication or sharding (``0SEND_F1``, ``1RECV_B3``, ``0UNSHARD``, ``0RESHARD``, ``0REDUCE_GRAD``) are ignored, so
that every file that torch writes can be used: here messages and reductions are always derived from the compute order.
"""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from runner.errors import Problem, RequestError, did_you_mean
from runner.options import Option
from runner.schedule.checking.schedule import cell, check, why_of
from runner.schedule.kinds import Legal, ScheduleRequest, ScheduleSpec
from runner.schedule.values import COMPUTE, Action, Op, Schedule, parse_action

__all__ = ["SPEC", "read_schedule", "schedule_of_rows"]

_logger = logging.getLogger(__name__)
_DERIVED = re.compile("[0-9]+(?:(?:SEND|RECV)_[FB][0-9]+|UNSHARD|RESHARD|REDUCE_GRAD)")
_DOUBLED = re.compile("([0-9]+)F([0-9]*[02468])[+]([0-9]+)")
_HALVED = re.compile("([0-9]+[BIW])([0-9]+)[.]([01])")
_PATH = "schedule.file"
_FORM = "must be <stage><op><micro-batch> with op F, B, I, W or R, e.g. 2F0"


def read_schedule(file: str) -> Schedule | list[Problem]:
    """Read and check the schedule in ``file``; return it, or its problems."""
    cells = _cells(file)
    if cells and isinstance(cells[0], Problem):
        return [cell for cell in cells if isinstance(cell, Problem)]
    return _schedule(file, [cell for cell in cells if not isinstance(cell, Problem)], "from_file")


def schedule_of_rows(rows: Sequence[Sequence[str]], name: str) -> Schedule | list[Problem]:
    """The checked schedule of each rank's list of cells, or what is wrong with it.

    Args:
        rows: per rank, cells as a file has them.
        name: name of the schedule, also in messages.
    """
    cells = [(rank, column, cell.strip()) for rank, row in enumerate(rows) for column, cell in enumerate(row)]
    empty = [(rank, 0, "") for rank, row in enumerate(rows) if not row]
    return _schedule(name, sorted([*cells, *empty]), name)


def _schedule(file: str, written: Sequence[_Cell], name: str) -> Schedule | list[Problem]:
    doubled, halved = (any(form.fullmatch(text) for _, _, text in written) for form in (_DOUBLED, _HALVED))
    rows = _rows(file, written, halved=halved)
    if rows and isinstance(rows[0], Problem):
        return [row for row in rows if isinstance(row, Problem)]
    actions = tuple(row for row in rows if not isinstance(row, Problem))
    if not any(actions):
        return [Problem(_PATH, file, "must hold at least one action", "Each row is one rank's list of cells like 0F0")]
    owners = _owners(actions)
    problems = [problem for owner in owners for problem in _placement_problems(file, actions, owner)]
    if problems:
        return problems
    placement = [tuple(owner[stage] for stage in range(len(owner))) for owner in owners]
    microbatches = 1 + max(a.microbatch or 0 for row in actions for a in row)
    schedule = Schedule(
        name=name,
        placement=tuple(placement),
        pipeline_of_microbatch=tuple(_pipelines(actions, placement, microbatches)),
        actions=actions,
        chunks=len(placement[0]) // len(actions),
        joined=2 if doubled or halved else 1,
        parts=2 if halved else 1,
    )
    return [Problem(_PATH, file, defect, why_of(defect)) for defect in check(schedule)] or schedule


_Cell = tuple[int, int, str]
"""Row and column, from 0, and the text of a cell."""


def _cells(file: str) -> list[_Cell] | list[Problem]:
    try:
        with Path(file).open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except OSError as error:
        return [Problem(_PATH, file, "must be a readable file", error.strerror or str(error), _nearby(file))]
    except (UnicodeDecodeError, csv.Error) as error:
        return [Problem(_PATH, file, "must be a CSV text file", str(error))]
    return [(rank, column, cell.strip()) for rank, row in enumerate(rows) for column, cell in enumerate(row)]


def _rows(file: str, cells: Sequence[_Cell], *, halved: bool) -> list[tuple[Action, ...]] | list[Problem]:
    """Each rank's actions, or problems; halves of micro-batches are numbered like micro-batches."""
    rows: list[list[Action]] = [[] for _ in range(1 + max((rank for rank, _, _ in cells), default=-1))]
    problems: list[Problem] = []
    derived, seen = 0, Counter[int]()
    for rank, _, text in cells:
        if not text:
            continue
        if _DERIVED.fullmatch(text):
            derived += 1
            continue
        index, seen[rank] = seen[rank], seen[rank] + 1
        found = _halves(text) if halved else _whole(text)
        if isinstance(found, str):
            defect = f"{cell(rank, index, text)}: {found}"
            problems.append(Problem(_PATH, file, defect, why_of(defect)))
        else:
            rows[rank] += found
    if derived:
        _logger.info("%s: %d cells of communication or sharding read over; they are derived here", file, derived)
    return problems or [tuple(row) for row in rows]


def _halves(text: str) -> list[Action] | str:
    """The actions on halves in a cell of a file with halves, or the rule that the cell breaks."""
    if found := _HALVED.fullmatch(text):
        return [parse_action(f"{found[1]}{2 * int(found[2]) + int(found[3])}")]
    action = _compute(text)
    if isinstance(action, str):
        return action
    if action.op is not Op.F:
        return "must name its half, .0 or .1, as others of this file do"
    assert action.microbatch is not None  # every compute action has one
    return [action._replace(microbatch=2 * action.microbatch + half) for half in (0, 1)]


def _whole(text: str) -> list[Action] | str:
    """The actions of a cell (two for a doubled forward), or the rule that the cell breaks."""
    if found := _DOUBLED.fullmatch(text):
        stage, first, second = map(int, found.groups())
        if second != first + 1:
            return f"must be a forward of micro-batches {first} and {first + 1}"
        return [Action(Op.F, stage, microbatch) for microbatch in (first, second)]
    action = _compute(text)
    return action if isinstance(action, str) else [action]


def _compute(text: str) -> Action | str:
    """The compute action of a cell, or the rule that the cell breaks."""
    if text.startswith("("):
        return "overlapped pairs are not available in this version; write the actions in two cells"
    try:
        action = parse_action(text)
    except ValueError:
        return _FORM
    if action.op is Op.FILL:  # no file says what such work is
        return _FORM
    if action.op not in COMPUTE:
        return "must be a compute action: F, B, I, W or R"
    return action


def _owners(actions: tuple[tuple[Action, ...], ...]) -> list[dict[int, int]]:
    """Stage -> rank of each pipeline, found from the rows.

    There are several pipelines if micro-batches take different ranks, provided that each way has all stages and the
    same number of stages on every rank.
    """
    one: dict[int, int] = {}
    ways: dict[int | None, dict[int, int]] = {}  # placements by micro-batch
    for rank, row in enumerate(actions):
        for action in row:
            one.setdefault(action.stage, rank)
            ways.setdefault(action.microbatch, {}).setdefault(action.stage, rank)
    distinct: list[dict[int, int]] = []
    for microbatch in sorted(ways, key=lambda number: number or 0):
        if ways[microbatch] not in distinct:
            distinct.append(ways[microbatch])
    whole = all(way.keys() == one.keys() and len(set(_counts(way, len(actions)))) == 1 for way in distinct)
    return distinct if whole else [one]


def _counts(owner: Mapping[int, int], ranks: int) -> list[int]:
    """The number of stages of each rank."""
    return [sum(1 for rank in owner.values() if rank == mine) for mine in range(ranks)]


def _pipelines(
    actions: tuple[tuple[Action, ...], ...], placement: Sequence[tuple[int, ...]], microbatches: int
) -> Iterator[int]:
    """The pipeline of each micro-batch: the one that fits all of its cells, or the first."""
    cells: list[set[tuple[int, int]]] = [set() for _ in range(microbatches)]
    for rank, row in enumerate(actions):
        for action in row:
            cells[action.microbatch or 0].add((action.stage, rank))
    for found in cells:
        yield next((row for row, way in enumerate(placement) if found <= set(enumerate(way))), 0)


def _placement_problems(
    file: str, actions: tuple[tuple[Action, ...], ...], owner: Mapping[int, int]
) -> Iterator[Problem]:
    """Problems of the placement of one pipeline's stages."""
    held = {(action.stage, rank) for rank, row in enumerate(actions) for action in row}
    if len(_owners(actions)) == 1:
        for stage, rank in sorted(held - set(owner.items())):
            rule = f"stage {stage} must be on one rank, but ranks {owner[stage]} and {rank} both have it"
            yield Problem(_PATH, file, rule)
    microbatches = {action.microbatch for row in actions for action in row}
    for what, numbers in (("stages", owner.keys()), ("micro-batches", microbatches)):
        absent = next(number for number in range(len(numbers) + 1) if number not in numbers)
        if absent < len(numbers):
            rule = f"{what} must be numbered from 0 without gaps, but {absent} is in no cell"
            yield Problem(_PATH, file, rule)
    counts = _counts(owner, len(actions))
    if len(set(counts)) > 1:
        rule = f"every rank must have the same number of stages, but the ranks have {', '.join(map(str, counts))}"
        yield Problem(_PATH, file, rule, "Costs and partition divide a rank's share evenly over its chunks")


def _nearby(file: str) -> str:
    path = Path(file)
    names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = did_you_mean(path.name, names)
    return f"schedule.file={path.parent / near}" if near else ""


def _read(request: ScheduleRequest) -> Schedule | list[Problem]:
    if (file := request.option("file")) is None:
        why = "The order is read from it: torch's schedule CSV, one row per rank, cells like 0F0"
        return [Problem("schedule.file", None, "must name a file for schedule=from_file", why, "schedule.file=FILE")]
    return read_schedule(file)


def _fits_file(request: ScheduleRequest) -> list[Problem]:
    found = _read(request)
    if not isinstance(found, Schedule):
        return found
    chunks = found.chunks if request.chunks is None else request.chunks
    pairs = (
        ("parallelism.pipeline", request.ranks, found.ranks, "ranks"),
        ("schedule.microbatches", request.microbatches, found.microbatches // found.parts, "micro-batches"),
        ("schedule.chunks", chunks, found.chunks, "chunks per rank"),
    )
    why = f"{request.option('file')} is written for so many"
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


SPEC = ScheduleSpec(
    name="from_file",
    position=240,
    description="the order written in a file (schedule.file), in torch's schedule CSV",
    summary="your own order",
    figures=("", ""),
    source="your file",
    formulas=None,
    generate=_generate_from_file,
    default_chunks=None,
    chunks=Legal("the file's", lambda ranks, chunks: True),
    microbatches=Legal("the file's", lambda ranks, microbatches: True),
    constraint=_fits_file,
    options=(
        Option(
            "file",
            str,
            "a schedule in torch's CSV form: one row per rank, cells like 0F0",
            "FILE",
            elsewhere="The order of the other schedules is generated",
            also=("pipeline_parallel_schedule_csv",),
        ),
    ),
)
