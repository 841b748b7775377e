"""Renders a plan as text for people."""

from __future__ import annotations

import io

from runner.config.units import format_bytes, format_seconds
from runner.plan.values import RunPlan

__all__ = ["stage_lines", "to_table"]

# Of longer pipelines, only the first and last positions are shown.
_SHOWN = 40


def to_table(plan: RunPlan, *, width: int = 118) -> str:
    """The layout, each stage, each position's memory with its parts, step time, bubble, and advice."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"memory by rank, limit {format_bytes(plan.memory_limit_bytes)}", title_justify="left")
    columns = ("rank", "peak", "of limit", *plan.memory.parts[0].as_dict())
    for column in columns:
        table.add_column(column, justify="right")
    for position in _shown(len(plan.memory.parts)):
        if position is None:
            table.add_row(*["…"] * len(columns))
            continue
        parts = plan.memory.parts[position]
        share = f"{parts.total / plan.memory_limit_bytes:.0%}"
        sizes = [format_bytes(size) for size in parts.as_dict().values()]
        table.add_row(_ranks(plan, position), format_bytes(parts.total), share, *sizes)
    stream = io.StringIO()
    console = Console(file=stream, width=width, highlight=False, color_system=None, soft_wrap=True)
    console.print(_headline(plan), *stage_lines(plan), sep="\n", markup=False)
    console.print(table)
    console.print(*_closing(plan), sep="\n", markup=False)
    return stream.getvalue()


def stage_lines(plan: RunPlan) -> list[str]:
    """One line for each stage: its ranks, its layers, and the parts of its memory and time."""
    seconds = sum(figures.seconds for figures in plan.figures)
    lines = []
    for stage in _shown(len(plan.figures)):
        if stage is None:
            lines.append("  …")
            continue
        figures = plan.figures[stage]
        share = f"{figures.seconds / seconds:.0%} of the compute time" if seconds else "compute time not known"
        positions = [plan.schedule.rows[row][stage] for row in plan.schedule.copies_of(stage)]
        ranks = " and ".join(_ranks(plan, position) for position in positions)
        word = "ranks" if len(positions) > 1 else _word(plan)
        count = plan.in_flight[stage]
        kept = f"{count} micro-batch{'es' if count != 1 else ''} in flight of {format_bytes(figures.saved_bytes)}"
        lines.append(
            f"  stage {stage} on {word} {ranks}: {_layers(plan.partition[stage])}, "
            f"{share}, weights {format_bytes(figures.weight_bytes)}, {kept}"
        )
    return lines


def _headline(plan: RunPlan) -> str:
    layout, schedule = plan.layout, plan.schedule
    what = "micro-batches" if schedule.parts == 1 else "halves of micro-batches"
    degrees = " x ".join(f"{name} {layout[name]}" for name in ("pipeline", "data", "tensor") if layout[name] > 1)
    ranks = f"{layout['world_size']} rank{'s' if layout['world_size'] != 1 else ''}"
    return (
        f"{ranks}{f' ({degrees})' if degrees else ''}: schedule {schedule.name}, "
        f"{schedule.microbatches // schedule.windows} {what} of up to {plan.profile.samples} samples, "
        f"{len(plan.partition)} stage{'s' if len(plan.partition) != 1 else ''} of {len(plan.profile.layers)} layers"
    )


def _closing(plan: RunPlan) -> list[str]:
    time = plan.time
    verdict = "fits" if plan.fits else "does not fit"
    return [
        f"{verdict}: at most {format_bytes(max(plan.memory.peak_bytes))} of {format_bytes(plan.memory_limit_bytes)}",
        *_reserved(plan),
        f"step {format_seconds(time.step_seconds)} ({time.source}), bubble {time.bubble_ratio:.1%}",
        *_filling(plan),
        *(f"note: {line}" for line in plan.advice),
        *(problem.line() for problem in plan.problems),
    ]


def _filling(plan: RunPlan) -> list[str]:
    time, every, filling = plan.time, plan.schedule.windows, plan.schedule.filling
    if filling is None:
        return []
    return [
        f"new {filling.brings} every {every} step{'s' if every > 1 else ''}; ranks are busy "
        f"{1 - time.bubble_ratio:.1%} of the time with {filling.work}'s work, "
        f"{time.utilisation_without_fills:.1%} without"
    ]


def _reserved(plan: RunPlan) -> list[str]:
    reserved = plan.memory.reserved
    return (
        [] if reserved is None else [f"torch's allocator reserves {format_bytes(reserved)}, with what it cannot reuse"]
    )


def _word(plan: RunPlan) -> str:
    return "ranks" if plan.layout["world_size"] > plan.layout["pipeline"] else "rank"


def _ranks(plan: RunPlan, position: int) -> str:
    """The ranks of all replicas at a pipe position, which have consecutive numbers."""
    width = plan.layout["data"] * plan.layout["tensor"]
    first = position * width
    return str(first) if width == 1 else f"{first}-{first + width - 1}"


def _layers(layers: tuple[int, int]) -> str:
    first, last = layers
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def _shown(count: int) -> list[int | None]:
    """The positions to print; None stands for those that are left out."""
    if count <= _SHOWN:
        return list(range(count))
    half = _SHOWN // 2
    return [*range(half), None, *range(count - half, count)]
