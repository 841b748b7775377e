"""Schedules and timelines as JSON, text, CSV, SVG and Chrome traces."""

from __future__ import annotations

from runner.schedule.render.document import to_json
from runner.schedule.render.events import Event, events_of
from runner.schedule.render.svg import Panel, panels_svg, schedules_svg, timeline_svg, to_svg
from runner.schedule.render.table import to_csv
from runner.schedule.render.text import schedules_text, to_text
from runner.schedule.render.trace import schedules_trace, timeline_trace, timelines_trace, to_trace

__all__ = [
    "Event",
    "Panel",
    "events_of",
    "panels_svg",
    "schedules_svg",
    "schedules_text",
    "schedules_trace",
    "timeline_svg",
    "timeline_trace",
    "timelines_trace",
    "to_csv",
    "to_json",
    "to_svg",
    "to_text",
    "to_trace",
]
