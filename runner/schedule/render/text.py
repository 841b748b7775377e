"""Draws schedules as text, as a grid over time or as the plain order."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from runner.schedule.generators.replicated import replicas_of
from runner.schedule.render.titles import title_of
from runner.schedule.simulation.clock import Costs, Simulation, StageCosts, simulate
from runner.schedule.values import COMPUTE, Action, Op, Program, Schedule

__all__ = ["schedules_text", "to_text"]

_WIDTH = 166  # longest line of a time grid; for longer times, a character means a longer time
_MOST_BANDS = 4  # number of grids below each other in which a long time is drawn, if one grid would hide actions
_AROUND = 8  # number of cells shown on each side of a marked cell in the plain order
_LEGEND = (
    "digit: forward of that micro-batch (mod 10); letter: its backward (a = 0); capital: weight gradient; "
    "~ recompute; . idle"
)

_Lane = tuple[int, int]
"""A lane, which is one line of a rank in the grid: row of the placement and stage."""


def schedules_text(drawn: Sequence[tuple[Schedule, Costs]], width: int) -> str:
    """Draw schedules below each other on one time scale, each under a title, with one legend for all.

    Args:
        drawn: the schedules with their durations.
        width: the longest line.
    """
    played = [(schedule, costs, simulate(schedule, costs)) for schedule, costs in drawn]
    label = max(_label_width(schedule) for schedule, _, _ in played)
    columns = width - label - 2
    scale = _readable_scale([times for _, _, times in played], columns)
    lines: list[str] = []
    for schedule, costs, times in played:
        grid = _bands(list(_grid_lines(schedule, times, None, scale.unit, label)), label + 2, columns, scale.unit)
        lines += [title_of(schedule, costs), *grid, *_result_lines(schedule, times), ""]
    fillings = [schedule.filling for schedule, _ in drawn if schedule.filling is not None]
    legend = "; ".join(dict.fromkeys([_LEGEND, *(filling.legend for filling in fillings)]))
    lines.append(f"one character = {scale}; {legend}")
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) if "|" not in line else line for line in lines)


def _bands(lines: Sequence[str], label: int, columns: int, unit: float) -> Iterator[str]:
    """Yield a grid's lines in bands of so many columns after the labels; each but the first says when it begins."""
    for first in range(0, max(len(line) for line in lines) - label, columns):
        if first:
            yield f"from {first * unit:g}"
        yield from (line[:label] + line[label + first : label + first + columns] for line in lines)


def to_text(
    view: Schedule | Program, costs: Costs | StageCosts | None = None, mark: tuple[int, int] | None = None
) -> str:
    """Draw ``view`` as text, with a legend.

    Args:
        view: a schedule or program; the time grid draws only its compute.
        costs: durations; a character of the grid is one unit of time. None: write each rank's actions in order, without
            times.
        mark: rank and index of an action to mark, e.g. one that failed.
    """
    if costs is None:
        return "\n".join(_order_lines(view, mark))
    return "\n".join(_time_lines(view, simulate(view, costs), mark))


def _order_lines(view: Schedule | Program, mark: tuple[int, int] | None) -> Iterable[str]:
    """Yield the order, one line for each rank; with a mark, only the actions around it, because lists are long."""
    longest = max(len(row) for row in view.actions)
    first = max(0, mark[1] - _AROUND) if mark else 0
    last = min(longest, mark[1] + _AROUND + 1) if mark else longest
    width = max((len(str(action)) for row in view.actions for action in row[first:last]), default=1)
    label_width = len(f"r{view.ranks - 1}")
    for rank, row in enumerate(view.actions):
        cells = " ".join(f"{action!s:<{width}}" for action in row[first:last])
        before, after = ("... " if first else ""), (" ..." if last < len(row) else "")
        yield f"r{rank:<{label_width - 1}} |{before}{cells}{after}".rstrip()
        if mark and mark[0] == rank:
            indent = label_width + 2 + len(before) + (mark[1] - first) * (width + 1)
            yield " " * indent + _pointer(row[mark[1]], mark, len(str(row[mark[1]])))
    if first or last < longest:
        yield f"cells {first} to {last - 1} of {longest}"


def _pointer(action: Action, mark: tuple[int, int], width: int) -> str:
    return f"{'^' * max(1, width)} here: {action} (rank {mark[0]}, cell {mark[1]})"


def _time_lines(view: Schedule | Program, times: Simulation, mark: tuple[int, int] | None) -> Iterable[str]:
    schedule = view.schedule if isinstance(view, Program) else view
    label = _label_width(schedule)
    scale = _scale([times], _WIDTH - label - 2)
    yield from _grid_lines(view, times, mark, scale.unit, label)
    filling = schedule.filling
    legend = f"{_LEGEND}; {filling.legend}" if filling is not None else _LEGEND
    yield f"one character = {scale}; {legend}"
    yield from _result_lines(schedule, times)


def _label_width(schedule: Schedule) -> int:
    labels = [label for rank in range(schedule.ranks) for label in _lanes(schedule, rank).values()]
    return max(4, *map(len, labels))


def _grid_lines(
    view: Schedule | Program, times: Simulation, mark: tuple[int, int] | None, unit: float, width: int
) -> Iterable[str]:
    """Yield the lanes of all ranks, with labels of so many characters, and a pointer to the marked cell."""
    schedule = view.schedule if isinstance(view, Program) else view
    columns = max(1, round(times.makespan / unit))
    lanes = [_lanes(schedule, rank) for rank in range(schedule.ranks)]
    for rank, row in enumerate(view.actions):
        drawn = _draw(view, times, rank, unit, columns)
        for lane, label in lanes[rank].items():
            yield f"{label:<{width}} |{_line(drawn, lane)}"
        if mark and mark[0] == rank:
            first, last = _span(times, rank, mark[1], unit)
            yield " " * (width + 2 + first) + _pointer(row[mark[1]], mark, last - first)


def _result_lines(schedule: Schedule, times: Simulation) -> Iterable[str]:
    yield f"span {times.makespan:g}, bubble {100 * times.bubble_ratio:.1f} % of all rank time"
    filling = schedule.filling
    if filling is not None:
        yield (
            f"new {filling.brings} every {schedule.windows} steps; ranks work "
            f"{100 * (1 - times.bubble_ratio):.1f} % of the time with {filling.work}'s work, "
            f"{100 * times.utilisation_without_fills:.1f} % without"
        )


class _Scale(NamedTuple):
    """The time that one character means, and whether every start and end is a multiple of it."""

    unit: float
    exact: bool

    def __str__(self) -> str:
        return f"{self.unit:g}" if self.exact else f"about {self.unit:.3g}"


def _readable_scale(played: Sequence[Simulation], columns: int) -> _Scale:
    """The scale of :func:`_scale`, or an exact one of a few bands where a character would be longer than an action."""
    scale = _scale(played, columns)
    spans = [
        end - start
        for times in played
        for row in zip(times.start, times.end, strict=True)
        for start, end in zip(*row, strict=True)
    ]
    if scale.unit <= min((span for span in spans if span > 0), default=scale.unit):
        return scale
    banded = _scale(played, _MOST_BANDS * columns)
    return banded if banded.exact else scale


def _scale(played: Sequence[Simulation], columns: int) -> _Scale:
    """One scale for several grids of at most so many columns.

    It is exact if the exact grids are not wider than allowed. Otherwise a character means so much time that the longest
    grid has the allowed width.
    """
    longest = max(times.makespan for times in played)
    moments = {moment for times in played for row in (*times.start, *times.end) for moment in row if moment > 0}
    near = [(Fraction(moment).limit_denominator(1000), moment) for moment in sorted(moments)]
    if all(math.isclose(fraction, moment, rel_tol=1e-9) for fraction, moment in near):
        denominator = math.lcm(*(fraction.denominator for fraction, _ in near))
        unit = math.gcd(*(int(fraction * denominator) for fraction, _ in near)) / denominator
        if unit and longest <= columns * unit:
            return _Scale(unit, exact=True)
    return _Scale(longest / columns or 1.0, exact=False)


def _lanes(schedule: Schedule, rank: int) -> dict[_Lane, str]:
    """The lanes of ``rank`` in the grid, with their labels: one for each placement row and stage that it holds."""
    held = [(row, stage) for row in range(len(schedule.rows)) for stage in _held(schedule, row, rank)]
    several = len(schedule.rows) > 1 and replicas_of(schedule) is None
    if not several:  # the replicas of a stage run it in turns, for one row or another: each has one lane
        held = [(0, stage) for stage in schedule.stages_of(rank)]
    labels = {}
    for row, stage in held:
        chunks = _held(schedule, row, rank) if several else schedule.stages_of(rank)
        chunk = str(chunks.index(stage)) if len(chunks) > 1 else ""
        pipe = _pipe_name(schedule, row) if several else ""
        labels[row, stage] = f"r{rank}{pipe}{'.' if chunk and not several else ''}{chunk}"
    return labels


def _held(schedule: Schedule, row: int, rank: int) -> list[int]:
    """The stages of a rank that get a lane; backwards get one only if they are on another rank than their forwards."""
    stages = [stage for stage, owner in enumerate(schedule.rows[row]) if owner == rank]
    return [stage for stage in stages if row < len(schedule.placement) or schedule.has_other_backward(stage)]


def _pipe_name(schedule: Schedule, row: int) -> str:
    """The letter of a pipeline: ``d`` (down) or ``u`` (up), with a number if there are several of one direction.

    If backwards are on other ranks than forwards, it is ``f`` for forwards and ``b`` for backwards. Parallel pipelines
    have only numbers: ``p0``, ``p1``.
    """
    if schedule.own_weights:
        return f"p{row}"
    if schedule.backward_placement:
        return "fb"[row]
    return "du"[row % 2] + (str(row // 2) if len(schedule.placement) > 2 else "")


def _draw(
    view: Schedule | Program, times: Simulation, rank: int, unit: float, columns: int
) -> list[tuple[_Lane, str] | None]:
    """For each column of the grid, the lane in which the rank works and the character to show; None if it is idle."""
    schedule = view.schedule if isinstance(view, Program) else view
    drawn: list[tuple[_Lane, str] | None] = [None] * columns
    by_row = replicas_of(schedule) is None
    for index, action in enumerate(view.actions[rank]):
        if action.op in COMPUTE:
            row = schedule.pipeline_of_microbatch[action.microbatch or 0]
            if action.op is not Op.F and schedule.has_other_backward(action.stage):
                row = len(schedule.placement)
            lane = row if by_row else 0, action.stage
            first, last = _span(times, rank, index, unit)
            for column in range(first, min(last, columns)):
                drawn[column] = (lane, _character(action, schedule))
    return drawn


def _span(times: Simulation, rank: int, index: int, unit: float) -> tuple[int, int]:
    first = round(times.start[rank][index] / unit)
    return first, max(first + 1, round(times.end[rank][index] / unit))


def _line(drawn: list[tuple[_Lane, str] | None], lane: _Lane) -> str:
    return "".join("." if cell is None else cell[1] if cell[0] == lane else " " for cell in drawn)


def _character(action: Action, schedule: Schedule) -> str:
    if action.op is Op.FILL:
        return schedule.filling.kind(action.fill).character if schedule.filling is not None else "?"
    microbatch = (action.microbatch or 0) // schedule.parts
    if action.op is Op.F:
        return str(microbatch % 10)
    if action.op is Op.R:
        return "~"
    letter = chr(ord("a") + microbatch % 26)
    return letter.upper() if action.op is Op.W else letter
