"""Renders a plan as text for people."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from runner.config.units import format_bytes, format_count, format_rate, format_seconds
from runner.plan.choice_notes import front_table, tightest
from runner.plan.values import RunPlan, TimePrediction

__all__ = ["table_text", "to_table", "trained_of_all"]

# Of longer pipelines, only the first and last positions are shown.
_SHOWN = 36
_LEFT_OUT = "…"
_AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"))
_LEAST_OF_A_UNIT = 2
_NO_BREAK = "\N{NO-BREAK SPACE}"


def to_table(plan: RunPlan, *, width: int = 80) -> str:
    """The layout, the model, tables of the stages and of each rank's memory, the step, and advice.

    Args:
        plan: the plan.
        width: the longest line; single words and numbers may be longer.
    """
    tables = (_stages(plan, width), *_cuts(plan, width), _memory(plan, width), *_choices(plan, width))
    lines = [*_wrapped(_headline(plan), width), "", *tables, *_wrapped(_closing(plan), width)]
    return "\n".join(lines) + "\n"


def table_text(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], width: int, left: int = 0) -> str:
    """A table as text whose columns are aligned to the right.

    Where it would be wider than allowed, names of columns are folded, and cells of columns on the left.

    Args:
        title: the line above.
        columns: the names of the columns.
        rows: the cells of each row.
        width: the longest line.
        left: the number of the first columns that are aligned to the left.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_style="none"
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right", overflow="fold")
    for row in rows:
        whole = (cell.replace(" ", _NO_BREAK) for cell in row[left:])  # only the names above them may be folded
        table.add_row(*map(Text, (*row[:left], *whole)))
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, color_system=None).print(table)
    lines = (line.replace(_NO_BREAK, " ").rstrip() for line in stream.getvalue().splitlines())
    return "\n".join(line for line in lines if line)


def _stages(plan: RunPlan, width: int) -> str:
    """One row for each stage: its ranks, its layers, its time, and what it keeps."""
    own = [figures.seconds / speed for figures, speed in zip(plan.figures, _speeds(plan), strict=True)]
    seconds, unlike = sum(own), bool(plan.devices)
    rows = []
    for stage in _shown(len(plan.figures)):
        if stage is None:
            rows.append([_LEFT_OUT] * (7 + unlike))
            continue
        figures = plan.figures[stage]
        positions = [plan.schedule.rows[row][stage] for row in plan.schedule.copies_of(stage)]
        rows.append(
            [
                str(stage),
                " and ".join(_ranks(plan, position) for position in positions),
                _layers(plan.partition[stage]),
                *([plan.devices[positions[0]].name] if unlike else ()),
                f"{own[stage] / seconds:.0%}" if seconds else "-",
                format_bytes(figures.weight_bytes),
                str(plan.in_flight[stage]),
                format_bytes(figures.saved_bytes),
            ]
        )
    count, layers = len(plan.partition), len(plan.profile.layers)
    title = f"{count} stage{'s' if count != 1 else ''}, {layers} layer{'s' if layers != 1 else ''} in all"
    device = ("device",) if unlike else ()
    return table_text(title, ("stage", "ranks", "layers", *device, "time", "weights", "in flight", "each"), rows, width)


def _speeds(plan: RunPlan) -> list[float]:
    """The speed of each stage's device, in parts of the described one's."""
    return [plan.devices[rank].speed if plan.devices else 1.0 for rank in plan.schedule.placement[0]]


def _cuts(plan: RunPlan, width: int) -> Iterator[str]:
    """Yield one row for each cut, if layers move while the run trains: its stages, its step, and its peak of memory."""
    rows = [
        (
            str(step),
            ", ".join(map(_layers, cut.partition)),
            format_seconds(cut.time.step_seconds),
            format_bytes(cut.peak_memory_bytes[cut.fullest]),
        )
        for step, cut in plan.cuts
    ]
    if rows:
        yield table_text("stages by step", ("after step", "layers", "step", "peak"), rows, width)


def _memory(plan: RunPlan, width: int) -> str:
    """One row for each position in the pipeline: its peak of memory with its parts."""
    names = tuple(plan.memory.parts[0].as_dict())
    host = plan.memory.host if any(plan.memory.host) else ()
    columns = ("rank", "peak", "of limit", *names, *(("host",) if host else ()))
    rows = []
    for position in _shown(len(plan.memory.parts)):
        if position is None:
            rows.append([_LEFT_OUT] * len(columns))
            continue
        parts = plan.memory.parts[position]
        sizes = [*parts.as_dict().values(), *([host[position]] if host else [])]
        limit = plan.device_limits[position] if plan.device_limits else plan.memory_limit_bytes
        share = f"{parts.total / limit:.0%}"
        rows.append([_ranks(plan, position), format_bytes(parts.total), share, *map(format_bytes, sizes)])
    limits = [format_bytes(each) for each in sorted(set(plan.device_limits or (plan.memory_limit_bytes,)))]
    title = f"memory by rank, limit {' to '.join(dict.fromkeys((limits[0], limits[-1])))}"
    return table_text(title, columns, rows, width)


def _choices(plan: RunPlan, width: int) -> Iterator[str]:
    """Yield the time of one stage under other budgets for its activations, if its program was chosen under one."""
    choices = plan.activations.choices
    if choices:
        stage = tightest(choices)
        columns, rows = front_table(choices[stage])
        title = f"stage {stage}: time by bytes for activations, 1.00 if all are kept"
        yield table_text(title, columns, rows, width)


def _headline(plan: RunPlan) -> Iterator[str]:
    layout, schedule, work = plan.layout, plan.schedule, plan.work
    count = schedule.microbatches // schedule.windows
    whole = "micro-batch" if count == 1 else "micro-batches"
    what = whole if schedule.parts == 1 else "halves of micro-batches"
    degrees = " x ".join(f"{name} {layout[name]}" for name in ("pipeline", "data", "tensor") if layout[name] > 1)
    ranks = f"{layout['world_size']} rank{'s' if layout['world_size'] != 1 else ''}"
    yield (
        f"{ranks}{f' ({degrees})' if degrees else ''}: schedule {schedule.name}, "
        f"{count} {what} of up to {plan.profile.samples} sample{'s' if plan.profile.samples != 1 else ''}"
    )
    shapes = " and ".join(" x ".join(map(str, (plan.profile.samples, *shape))) for shape in plan.profile.sample_shapes)
    tokens = f", {work.tokens:,} tokens" if work.tokens else ""
    step = f"; a step has {work.samples:,} samples{tokens}" if work.samples else ""
    yield f"{trained_of_all(plan)}{f'; input {shapes}' if shapes else ''}{step}"


def trained_of_all(plan: RunPlan) -> str:
    """How many parameters the model has, and how many of them are trained."""
    total, trained = plan.profile.num_parameters, plan.profile.num_trained
    share = "all trained" if trained == total else f"{trained:,} of {total:,} trained"
    kept = plan.profile.in_evaluation
    modes = f"; {kept} module{'s stay' if kept != 1 else ' stays'} in evaluation mode" if kept else ""
    return f"{format_count(total)} parameters, {share}{modes}"


def _closing(plan: RunPlan) -> Iterator[str]:
    time = plan.time
    verdict = "fits" if plan.fits else "does not fit"
    peak, limit = format_bytes(plan.peak_memory_bytes[plan.fullest]), format_bytes(plan.limit_of(plan.fullest))
    yield f"{verdict}: at most {peak} of {limit}{' (rehearsed)' if plan.memory.is_rehearsed else ''}"
    yield from _host(plan)
    bubble = f", bubble {time.bubble_ratio:.1%}" if plan.has_bubble else ""
    yield f"step {format_seconds(time.step_seconds)} ({time.source}{_measured(plan)}){bubble}{_expected(time)}"
    yield from _speed(plan)
    if plan.tensor_bytes_sent:
        yield f"parts of layers: {format_bytes(plan.tensor_bytes_sent)} sent in a step by all ranks together"
    if plan.gradient_bytes_sent:
        yield f"gradients: {format_bytes(plan.gradient_bytes_sent)} sent in a step by all ranks together"
    notes = (f"note: {line}" for line in plan.advice)
    yield from (*_filling(plan), *notes, *(problem.line() for problem in plan.problems))


def _expected(time: TimePrediction) -> str:
    if time.expected is None:
        return ""
    low, high = map(format_seconds, time.expected)
    return f"; expected between {low} and {high}"


def _measured(plan: RunPlan) -> str:
    """When seconds were measured, if it is some time ago, and what disturbed it."""
    profile = plan.profile
    if plan.time.source != "measured" or profile.age_seconds is None:
        return ""
    counts = ((profile.age_seconds // seconds, unit) for seconds, unit in _AGES)
    count, unit = next((each for each in counts if each[0] >= _LEAST_OF_A_UNIT), (0, ""))
    ago = f" {count} {unit} ago" if count else ""
    return ago + (f", while other work took {profile.busy_share:.0%} of a core" if profile.is_disturbed else "")


def _speed(plan: RunPlan) -> Iterator[str]:
    """Yield what a step computes in a second."""
    work, seconds = plan.work, plan.time.step_seconds
    samples, tokens, mfu = work.samples_per_second(seconds), work.tokens_per_second(seconds), work.mfu(seconds)
    told = [f"{format_rate(samples)} samples/s"] if samples else []
    told += [f"{format_rate(tokens)} tokens/s"] if tokens else []
    told += [f"MFU {mfu:.1%}"] if mfu is not None else []
    if told:
        yield ", ".join(told)


def _host(plan: RunPlan) -> Iterator[str]:
    """Yield the memory of the host to which ranks offload."""
    most, limit = max(plan.memory.host, default=0), plan.host_limit_bytes
    if most:
        yield f"host: at most {format_bytes(most)} a rank{f' of {format_bytes(limit)}' if limit is not None else ''}"


def _filling(plan: RunPlan) -> list[str]:
    time, every, filling = plan.time, plan.schedule.windows, plan.schedule.filling
    if filling is None:
        return []
    return [
        f"new {filling.brings} every {every} step{'s' if every > 1 else ''}; ranks are busy "
        f"{1 - time.bubble_ratio:.1%} of the time with {filling.work}'s work, "
        f"{time.utilisation_without_fills:.1%} without"
    ]


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    """The lines, those that are too long as several, indented after the first."""
    wrap = textwrap.TextWrapper(width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in (wrap.wrap(line) or [""])]


def _ranks(plan: RunPlan, position: int) -> str:
    """The ranks of all replicas at a pipe position, which have consecutive numbers."""
    width = plan.layout["data"] * plan.layout["tensor"]
    first = position * width
    return str(first) if width == 1 else f"{first}-{first + width - 1}"


def _layers(layers: tuple[int, int]) -> str:
    first, last = layers
    return str(first) if first == last else f"{first}-{last}"


def _shown(count: int) -> list[int | None]:
    """The positions to print; None stands for those that are left out."""
    if count <= _SHOWN:
        return list(range(count))
    half = _SHOWN // 2
    return [*range(half), None, *range(count - half, count)]
