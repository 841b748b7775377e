"""Draws timelines as SVG, predicted and measured ones alike: each rank is a row, and time runs to the right.

Below each forward and backward of an asynchronous schedule, a strip has the colour of the version that it reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from typing import NamedTuple

from runner.printable import printable_line
from runner.schedule.fills import Filling
from runner.schedule.render.events import BESIDE, Event, events_of
from runner.schedule.render.titles import title_of
from runner.schedule.simulation.clock import Costs, StageCosts, simulate
from runner.schedule.values import Program, Schedule

__all__ = ["Panel", "panels_svg", "schedules_svg", "timeline_svg", "to_svg"]

_COLORS = {
    "F": ("#8fb8ed", "forward"),
    "B": ("#90cf9a", "backward"),
    "I": ("#6fc7c0", "input gradient"),
    "W": ("#f4b66a", "weight gradient"),
    "R": ("#c9b6e4", "recompute"),
}
"""Op -> colour and name, for forwards and backwards; in legends, kinds of fills come after these."""
_UPDATE_COLORS = {
    "STEP": ("#7a5ea8", "optimizer step"),
    "REDUCE": ("#d1495b", "gradient reduction"),
    "SEND": ("#6b7280", "send"),
    "RECV": ("#b0b5bd", "receive"),
}
_OTHER = ("#d9c7a7", "#b9a3a3", "#a3b9ae", "#c4c48f")  # colours of other work, in the order of its appearance
_VERSIONS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#1f78b4", "#e6ab02")
"""Colours of versions of the weights; a version's is that of its remainder by their number."""
_IDLE = "#f1f2f4"
_TEXT = "#1f2430"
_WIDTH = 900.0  # pixels of the time axis
_LANE, _BESIDE_LANE, _GAP = 26.0, 6.0, 6.0
_VERSION = 5.0  # height of the strip below a forward or backward that shows the version of the weights it reads
_LEFT, _TOP, _RIGHT = 64.0, 40.0, 20.0
_TINT = 0.64  # the last chunk of a rank is drawn so much lighter than the first; with two chunks, half of it


def to_svg(view: Schedule | Program, costs: Costs | StageCosts, *, title: str | None = None, unit: str = "") -> str:
    """Draw the simulated timeline of ``view``.

    Args:
        view: the schedule or program to simulate and draw.
        costs: its durations.
        title: the title; None means a title with the schedule's size, its costs and its bubble ratio.
        unit: the unit of the costs, for the axis; empty if they have none.
    """
    schedule = view.schedule if isinstance(view, Program) else view
    panel = Panel(_title(view, costs) if title is None else title, events_of(view, costs), schedule.filling)
    return panels_svg([panel], unit=unit)


def schedules_svg(drawn: Sequence[tuple[Schedule, Costs]]) -> str:
    """Draw the simulated timelines of several schedules below each other on one time scale."""
    return panels_svg([Panel(_title(*each), events_of(*each), each[0].filling) for each in drawn], unit="")


def _title(view: Schedule | Program, costs: Costs | StageCosts) -> str:
    schedule = view.schedule if isinstance(view, Program) else view
    return f"{title_of(schedule, costs)}, bubble {100 * simulate(view, costs).bubble_ratio:.1f} %"


class Panel(NamedTuple):
    """One timeline of a picture.

    Args:
        title: the text above the timeline.
        events: its events; the compute of one rank must not overlap, messages may.
        filling: defines colours and names of fills; None draws fills, if there are any, as other work.
    """

    title: str
    events: Sequence[Event]
    filling: Filling | None = None


def timeline_svg(
    events: Iterable[Event], *, title: str, unit: str = "s", span: tuple[float, float] | None = None
) -> str:
    """Draw one timeline; arguments are those of :class:`Panel` and :func:`panels_svg`."""
    return panels_svg([Panel(title, tuple(events))], unit=unit, span=span)


def panels_svg(panels: Sequence[Panel], *, unit: str = "s", span: tuple[float, float] | None = None) -> str:
    """Draw timelines below each other on one time scale; a rank's row is grey where it is idle before the end.

    Args:
        panels: the timelines, from top to bottom.
        unit: the unit of the events' times, for the axis.
        span: the first and last moment to draw; None means those of all events.
    """
    events = [event for panel in panels for event in panel.events]
    first, last = span or (min((e.start for e in events), default=0.0), max((e.end for e in events), default=0.0))
    has_messages = any(event.op in BESIDE and event.end > event.start for event in events)
    drawing = _Drawing(first, last, _colors(panels), _LANE + _GAP + (_BESIDE_LANE if has_messages else 0.0), unit)
    parts, top = [], 0.0
    for panel in panels:
        drawn, top = drawing.panel(panel, top)
        parts.append(drawn)
    chunks = max((len(stages) for panel in panels for stages in _chunks(panel.events).values()), default=1)
    height = top + 24.0
    head = _head(_LEFT + _WIDTH + _RIGHT, height, "; ".join(panel.title for panel in panels))
    return "\n".join([head, *parts, *_legend(drawing.colors, events, chunks, height - 12.0), "</svg>\n"])


@dataclass(frozen=True)
class _Drawing:
    """The settings that all panels of a picture share, and the drawing of one panel with them.

    Args:
        first, last: the first and last moment of the time axis.
        colors: op -> colour and name.
        row_height: height of a rank's row in pixels.
        unit: the unit of time.
    """

    first: float
    last: float
    colors: dict[str, tuple[str, str]]
    row_height: float
    unit: str

    def panel(self, panel: Panel, top: float) -> tuple[str, float]:
        """Draw a panel whose upper edge is at ``top``; return the drawing and the position of its lower edge."""
        drawn = sorted(panel.events, key=lambda event: (event.rank, event.start))
        rows = sorted({event.rank for event in drawn})
        tops = {rank: top + _TOP + self.row_height * place for place, rank in enumerate(rows)}
        bottom = top + _TOP + self.row_height * len(rows)
        scale = _WIDTH / (self.last - self.first) if self.last > self.first else 0.0
        width = (min(self.last, max((event.end for event in drawn), default=0.0)) - self.first) * scale
        parts = [
            _text(_LEFT, top + 24.0, panel.title, 15, weight="600"),
            *(_row(rank, y, width) for rank, y in tops.items()),
            *_boxes(drawn, tops, self.first, scale, self.colors),
            *_axis(self.first, self.last, scale, bottom, self.unit),
        ]
        return "\n".join(parts), bottom + 40.0


def _colors(panels: Sequence[Panel]) -> dict[str, tuple[str, str]]:
    """The colour and name of every op that occurs, known ops first."""
    found = list(dict.fromkeys(event.op for panel in panels for event in panel.events))
    kinds = [kind for panel in panels if panel.filling is not None for kind in panel.filling.kinds]
    named = _COLORS | {kind.name: (kind.color, kind.label) for kind in kinds} | _UPDATE_COLORS
    others = [op for op in found if op not in named]
    known = {op: entry for op, entry in named.items() if op in found}
    return known | {op: (_OTHER[place % len(_OTHER)], op) for place, op in enumerate(others)}


def _head(width: float, height: float, title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="Helvetica, Arial, sans-serif" fill="{_TEXT}">\n'
        f'<title>{_xml(title)}</title>\n<rect width="100%" height="100%" fill="#ffffff"/>'
    )


def _text(x: float, y: float, content: str, size: float, anchor: str = "start", weight: str = "400") -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size:g}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{_xml(content)}</text>'
    )


def _rectangle(x: float, y: float, width: float, height: float, color: str, hint: str = "") -> str:
    tip = f"<title>{_xml(hint)}</title>" if hint else ""
    edge = ' stroke="#ffffff" stroke-width="0.8"' if width > 3 else ""
    shape = f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" fill="{color}"{edge}'
    return f"{shape}>{tip}</rect>" if tip else f"{shape}/>"


def _row(rank: int, y: float, width: float) -> str:
    idle = _rectangle(_LEFT, y, width, _LANE, _IDLE)
    return _text(_LEFT - 8, y + _LANE / 2 + 4, f"rank {rank}", 12, anchor="end") + "\n" + idle


def _boxes(
    events: Sequence[Event],
    tops: dict[int, float],
    first: float,
    scale: float,
    colors: dict[str, tuple[str, str]],
) -> Iterator[str]:
    chunks = _chunks(events)
    digits = max((len(str(event.microbatch)) for event in events if event.microbatch is not None), default=1)
    for event in events:
        x, width = _LEFT + (event.start - first) * scale, (event.end - event.start) * scale
        if width <= 0:
            continue
        color = colors[event.op][0]
        y = tops[event.rank]
        if event.op in BESIDE:
            yield _rectangle(x, y + _LANE, width, _BESIDE_LANE - 1, color, event.label)
            continue
        if event.stage is not None:
            stages = chunks[event.rank]
            color = _lighter(color, _tint(stages.index(event.stage), len(stages)))
        yield _rectangle(x, y, width, _LANE, color, event.label)
        if event.version is not None:
            yield _rectangle(x, y + _LANE - _VERSION, width, _VERSION, _VERSIONS[event.version % len(_VERSIONS)])
        number = "" if event.microbatch is None else str(event.microbatch)
        if number and width >= 6.5 * digits:  # room for the longest number
            yield _text(x + width / 2, y + _LANE / 2 + 4, number, 11, anchor="middle")


def _chunks(events: Iterable[Event]) -> dict[int, list[int]]:
    """Rank -> its stages, ascending."""
    stages: dict[int, set[int]] = {}
    for event in events:
        if event.stage is not None:
            stages.setdefault(event.rank, set()).add(event.stage)
    return {rank: sorted(found) for rank, found in stages.items()}


def _tint(chunk: int, chunks: int) -> float:
    """How much lighter a chunk is drawn, from 0 to 1, so that it differs from its neighbours."""
    return _TINT * chunk / max(2, chunks - 1)


def _lighter(color: str, share: float) -> str:
    levels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(level + (255 - level) * share):02x}" for level in levels)


def _axis(first: float, last: float, scale: float, y: float, unit: str) -> Iterator[str]:
    yield f'<path d="M{_LEFT:g} {y:g}h{_WIDTH:g}" stroke="{_TEXT}" stroke-width="1"/>'
    for tick in _ticks(last - first):
        x = _LEFT + tick * scale
        yield f'<path d="M{x:.2f} {y:g}v4" stroke="{_TEXT}" stroke-width="1"/>'
        yield _text(x, y + 17, f"{tick:g}", 11, anchor="middle")
    yield _text(_LEFT - 8, y + 17, f"time / {unit}" if unit else "time", 11, anchor="end")


def _ticks(length: float) -> Iterator[float]:
    """Round numbers from 0 to ``length``, about ten of them."""
    if length <= 0:
        return
    power = 10.0 ** math.floor(math.log10(length / 10))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= length / 12)
    for count in range(int(length / step * (1 + 1e-9)) + 1):
        yield round(count * step, 12)


def _legend(colors: dict[str, tuple[str, str]], events: Sequence[Event], chunks: int, y: float) -> Iterator[str]:
    visible = {event.op for event in events if event.end > event.start}
    shown = [entry for op, entry in colors.items() if op in visible] + [(_IDLE, "idle")]
    if chunks > 1:
        base = next((colors[op][0] for op in colors if op in visible), _TEXT)
        shown += [(_lighter(base, _tint(chunk, chunks)), f"chunk {chunk}") for chunk in range(chunks)]
    versions = sorted({event.version for event in events if event.version is not None})
    shown += [(_VERSIONS[each % len(_VERSIONS)], f"version {each}") for each in versions[: len(_VERSIONS)]]
    x = _LEFT
    for color, name in shown:
        square = f'<rect x="{x:.2f}" y="{y - 10:g}" width="12" height="12" fill="{color}"'
        yield f'{square} stroke="#9aa0aa" stroke-width="0.5"/>'
        yield _text(x + 17, y, name, 12)
        x += 17 + 6.6 * len(name) + 18


def _xml(content: str) -> str:
    """Text for SVG, which as XML may hold no control characters."""
    return escape_html(printable_line(content))
