"""Draws schedules as text, as a grid over time or as the plain order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from runner.schedule.simulation.clock import Costs, Simulation, StageCosts, simulate
from runner.schedule.values import COMPUTE, Action, Op, Program, Schedule

__all__ = ["to_text"]

_COLUMNS = 160  # width of the widest time grid; for longer times, a character means a longer time
_AROUND = 8  # number of cells shown on each side of a marked cell in the plain order
_LEGEND = (
    "digit: forward of that micro-batch (mod 10); letter: its backward (a = 0); capital: weight gradient; "
    "~ recompute; . idle"
)

_Lane = tuple[int, int]
"""A lane, which is one line of a rank in the grid: row of the placement and stage."""


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
    unit, exact = _unit(times)
    columns = max(1, round(times.makespan / unit))
    lanes = [_lanes(schedule, rank) for rank in range(schedule.ranks)]
    width = max(4, *(len(label) for rank_lanes in lanes for label in rank_lanes.values()))
    for rank, row in enumerate(view.actions):
        drawn = _draw(view, times, rank, unit, columns)
        for lane, label in lanes[rank].items():
            yield f"{label:<{width}} |{_line(drawn, lane)}"
        if mark and mark[0] == rank:
            first, last = _span(times, rank, mark[1], unit)
            yield " " * (width + 2 + first) + _pointer(row[mark[1]], mark, last - first)
    filling = schedule.filling
    legend = f"{_LEGEND}; {filling.legend}" if filling is not None else _LEGEND
    yield f"one character = {'' if exact else 'about '}{unit:g}; {legend}"
    yield f"span {times.makespan:g}, bubble {100 * times.bubble_ratio:.1f} % of all rank time"
    if filling is not None:
        yield (
            f"new {filling.brings} every {schedule.windows} steps; ranks work "
            f"{100 * (1 - times.bubble_ratio):.1f} % of the time with {filling.work}'s work, "
            f"{100 * times.utilisation_without_fills:.1f} % without"
        )


def _unit(times: Simulation) -> tuple[float, bool]:
    """The time that one character means, and whether it is exact.

    It is exact if every start and end is a multiple of it and the grid is not wider than allowed. Otherwise it is so
    long that the grid has the allowed width.
    """
    moments = sorted({moment for row in (*times.start, *times.end) for moment in row if moment > 0})
    near = [Fraction(moment).limit_denominator(1000) for moment in moments]
    if all(math.isclose(fraction, moment, rel_tol=1e-9) for fraction, moment in zip(near, moments, strict=True)):
        denominator = math.lcm(*(fraction.denominator for fraction in near))
        unit = math.gcd(*(int(fraction * denominator) for fraction in near)) / denominator
        if unit and times.makespan <= _COLUMNS * unit:
            return unit, True
    return (times.makespan / _COLUMNS or 1.0), False


def _lanes(schedule: Schedule, rank: int) -> dict[_Lane, str]:
    """The lanes of ``rank`` in the grid, with their labels: one for each placement row and stage that it holds."""
    held = [(row, stage) for row in range(len(schedule.rows)) for stage in _held(schedule, row, rank)]
    several = len(schedule.rows) > 1
    labels = {}
    for row, stage in held:
        chunks = _held(schedule, row, rank)
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

    If backwards are on other ranks than forwards, it is ``f`` for forwards and ``b`` for backwards.
    """
    if schedule.backward_placement:
        return "fb"[row]
    return "du"[row % 2] + (str(row // 2) if len(schedule.placement) > 2 else "")


def _draw(
    view: Schedule | Program, times: Simulation, rank: int, unit: float, columns: int
) -> list[tuple[_Lane, str] | None]:
    """For each column of the grid, the lane in which the rank works and the character to show; None if it is idle."""
    schedule = view.schedule if isinstance(view, Program) else view
    drawn: list[tuple[_Lane, str] | None] = [None] * columns
    for index, action in enumerate(view.actions[rank]):
        if action.op in COMPUTE:
            row = schedule.pipeline_of_microbatch[action.microbatch or 0]
            if action.op is not Op.F and schedule.has_other_backward(action.stage):
                row = len(schedule.placement)
            lane = row, action.stage
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
