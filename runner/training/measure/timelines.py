"""Draws the predicted and the measured timeline of a step side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from runner.plan.values import RunPlan
from runner.schedule.render.events import Event, events_of
from runner.schedule.render.svg import Panel, panels_svg
from runner.schedule.render.trace import timelines_trace
from runner.training.measure.measures import RankMeasures, timed_events

__all__ = ["draw_timelines"]


def draw_timelines(
    run_dir: Path, plan: RunPlan, measures: Sequence[RankMeasures], walls: Mapping[int, float]
) -> dict[str, str]:
    """Write the timelines of the first replica's pipeline: a picture with one time axis, and a Chrome trace.

    Args:
        run_dir: where to write.
        plan: the prediction.
        measures: the measurements of all ranks.
        walls: seconds of every timed step by its index; the recorded step nearest to the median is drawn.

    Returns:
        the artifacts by name; empty if no timed step has recorded events.
    """
    pipeline = [rank for rank in measures if rank.replica == 0]
    found = timed_events(pipeline, list(walls), walls)
    if found is None:
        return {}
    step, by_rank = found
    origin = min(event.start for events in by_rank.values() for event in events)
    measured = [
        Event(rank, event.op, event.stage, event.microbatch, event.start - origin, event.end - origin)
        for rank, own in by_rank.items()
        for event in own
    ]
    predicted = events_of(plan.schedule, plan.time.costs)
    titled = {f"{plan.schedule.name}, predicted": predicted, f"step {step + 1}, measured": measured}
    panels = [Panel(title, events, plan.schedule.filling) for title, events in titled.items()]
    (run_dir / "timeline.svg").write_text(panels_svg(panels), encoding="utf-8")
    trace = timelines_trace({"predicted": predicted, "measured": measured})
    (run_dir / "timeline.json").write_text(json.dumps(trace), encoding="utf-8")
    return {"timeline": "timeline.svg", "trace": "timeline.json"}
