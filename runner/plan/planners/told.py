"""Tells a user what ``parallelism=auto`` chose and why, or what lacks if nothing fits."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runner.config.units import format_bytes, format_seconds
from runner.plan.planners.choose import FASTEST, FOUND_FIRST, NOT_TOLD_APART, Choice, Chosen
from runner.plan.planners.values import PlanningProblem
from runner.plan.render import table_text
from runner.plan.uncertainty import USUAL_GAIN
from runner.plan.values import RunPlan
from runner.schedule.generators.replicated import replicas_of

__all__ = [
    "chosen_document",
    "chosen_lines",
    "misfit_line",
    "order_text",
    "other_value_lines",
    "other_values",
    "runners_up_text",
]

_OF_SEARCH = (FASTEST, FOUND_FIRST)


def chosen_lines(chosen: Chosen, problem: PlanningProblem, words: Sequence[str]) -> list[str]:
    """Five lines: what was chosen, why, its time, its memory, and the command that asks for it.

    Before the command, a line says what was not searched, if there is such.

    Args:
        chosen: what the search found; it fits.
        problem: what was searched.
        words: the whole request.
    """
    best = chosen.best
    idle = problem.ranks - best.answer.world_size
    unused = (
        f"; {idle} of {problem.ranks} ranks stay idle: nothing with more was found to fit and be faster" if idle else ""
    )
    return [
        f"parallelism=auto: {_layout(best)}{unused}",
        f"why: {_why(chosen, problem)}",
        f"time: {_time(best.plan)}",
        f"memory: {_memory(best.plan)}",
        *([f"not searched: {'; '.join(problem.left_out)}"] if problem.left_out else []),
        f"run it: {shlex.join(['runner', 'train', *words])}",
    ]


def _layout(choice: Choice) -> str:
    answer = choice.answer
    turns = f" (ranks of each stage: {', '.join(map(str, answer.turns))})" if answer.turns else ""
    degrees = f"pipeline {answer.pipeline}{turns} x data {answer.data} x tensor {answer.tensor}"
    order = f", schedule {answer.order.schedule}" if answer.order is not None else ""
    order += f" with stages on ranks {', '.join(map(str, answer.placement))}" if answer.placement else ""
    chunks = (
        f" with {answer.order.chunks} stages per rank" if answer.order is not None and answer.order.chunks > 1 else ""
    )
    samples = f"{'at most ' if answer.shares else ''}{choice.plan.profile.samples}"
    counted = f"{answer.microbatches} micro-batch{'es' if answer.microbatches > 1 else ''} of {samples}"
    ranks = f"{answer.world_size} rank{'s' if answer.world_size > 1 else ''}"
    told = f"{ranks}, {degrees}{order}{chunks}, {counted}, recomputation {_kept(choice)}, ZeRO {answer.zero or 'none'}"
    return f"{told}, in the host's memory {_in_host(choice)}" if _in_host(choice) else told


def order_text(plan: RunPlan) -> str:
    """The schedule of a plan with a pipeline, and the ranks of its stages where these differ; else nothing."""
    turns = replicas_of(plan.schedule)
    ranks = f" [{','.join(map(str, turns))}]" if turns else ""
    if plan.schedule.name == "1f1b" and plan.schedule.stages > plan.schedule.ranks:
        ranks = f" on ranks {'-'.join(map(str, plan.schedule.placement[0]))}"
    return f"{plan.schedule.name}{ranks}" if plan.has_bubble else ""


def _kept(choice: Choice) -> str:
    kept = choice.answer.kept
    names = set(kept)
    if len(names) == 1:
        return {"asked": "as asked"}.get(kept[0], kept[0])
    stages = [str(stage) for stage, name in enumerate(kept) if name != "none"]
    return f"in stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"


def _in_host(choice: Choice) -> str:
    """What a layout has in the host's memory; empty if nothing."""
    moved = choice.answer.moved
    stages = f"activations of stage{'s' if len(moved) > 1 else ''} {', '.join(map(str, moved))}" if moved else ""
    return " and ".join(filter(None, (stages, "optimizer states" if choice.answer.states_in_host else "")))


def _why(chosen: Chosen, problem: PlanningProblem) -> str:
    if chosen.best.answer.planner != "joint":
        own = format_seconds(chosen.best.answer.seconds)
        return f"planner={chosen.best.answer.planner} chose it, by its own model with {own} a step"
    told = f"{chosen.searched:,} layouts with their orders and {chosen.evaluated:,} cuts were compared"
    if not chosen.complete:
        told += " until the search reached its limit of work (parallelism.search=thorough has ten times as much)"
    if problem.overhead:
        told += f", with {format_seconds(problem.overhead)} of the engine for each action"
    fitting = [each for each in chosen.runners_up if each.plan.fits]
    if not fitting:
        return f"{told}; nothing of another kind fits"
    other = fitting[0]
    longer = other.seconds / chosen.best.seconds - 1
    by = "as fast" if abs(longer) < 0.0005 else f"{abs(longer):.1%} {'longer' if longer > 0 else 'shorter'}"
    told += f"; the next of another kind ({other.told}) is {by}, {format_seconds(other.seconds)}"
    if any(each.told == FASTEST for each in fitting):
        told += f"; what is chosen is simpler, and predictions do not tell gains below {NOT_TOLD_APART:.0%}"
    close = [each.told for each in fitting if each.told not in _OF_SEARCH and is_undecided(chosen.best, each)]
    return f"{told}; within what is known, as fast are: {', '.join(close)}" if close else told


def is_undecided(best: Choice, other: Choice) -> bool:
    """Whether it is not certain which of two layouts is faster: gains below this share are not told elsewhere, either.

    What is not known of the layers themselves is the same for both.
    """
    return abs(other.seconds / best.seconds - 1) < USUAL_GAIN


def _time(plan: RunPlan) -> str:
    time, source = plan.time, "by measured layers" if plan.time.source == "measured" else "estimated from FLOPs"
    told = f"{format_seconds(time.step_seconds)} a step, {source}"
    if time.expected is not None:
        told += f" (expected between {' and '.join(map(format_seconds, time.expected))})"
    if plan.has_bubble:
        told += f", bubble {time.bubble_ratio:.0%}"
    alone = max(time.busy_seconds)
    return f"{told}; the busiest rank computes for {format_seconds(alone)}"


def _memory(plan: RunPlan) -> str:
    peaks, rank = plan.peak_memory_bytes, plan.fullest
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.rank_parts[rank].as_dict().items() if size)
    return f"at most {format_bytes(peaks[rank])} of {format_bytes(plan.limit_of(rank))} (rank {rank}: {parts})"


def other_values(chosen: Chosen) -> list[dict[str, Any]]:
    """For each free key the best plan with another value, of all that were planned; each with its step."""
    best, found = chosen.best, []
    for name, value in _VALUES.items():
        others = [each for each in chosen.planned if each.plan.fits and value(each) != value(best)]
        if others:
            other = min(others, key=lambda each: each.seconds)
            found.append(
                {"key": name, "value": value(other), "step_seconds": other.seconds, "overrides": _words(other.keys)}
            )
    return found


def other_value_lines(chosen: Chosen) -> list[str]:
    """The same as lines."""
    return [
        f"{row['key']} {row['value']}: {format_seconds(row['step_seconds'])} a step, "
        f"{row['step_seconds'] / chosen.best.seconds - 1:+.1%}"
        for row in other_values(chosen)
    ]


_VALUES: dict[str, Callable[[Choice], Any]] = {
    "pipeline": lambda choice: choice.answer.pipeline,
    "data": lambda choice: choice.answer.data,
    "tensor": lambda choice: choice.answer.tensor,
    "schedule": lambda choice: choice.answer.order.schedule if choice.answer.order is not None else "none",
    "micro-batches": lambda choice: choice.answer.microbatches,
    "recomputation": lambda choice: _kept(choice),
    "ZeRO": lambda choice: choice.answer.zero or "none",
    "in the host": lambda choice: _in_host(choice) or "nothing",
}


def runners_up_text(chosen: Chosen, width: int) -> str:
    """A table of the best layout and those that differ in kind; empty if there are no others."""
    if not chosen.runners_up:
        return ""
    header = ("layout", "schedule", "T x b", "again", "ZeRO", "step", "peak")
    choices = (chosen.best, *chosen.runners_up)
    kinds, rows = [_kind(each) for each in choices], [_row(each) for each in choices]
    told = [at for at in range(len(rows[0])) if any(row[at] not in ("-", "none") for row in rows)]

    def table(first: Sequence[str], column: str, columns: int) -> str:
        shown = [(one, *(row[at] for at in told)) for one, row in zip(first, rows, strict=True)]
        return table_text("", [column, *(header[at] for at in told)], shown, columns, left=1).rstrip("\n")

    whole = table(kinds, "kind", 10_000)
    if max(map(len, whole.splitlines())) <= width:
        return whole
    numbers = [str(number) for number in range(1, len(kinds) + 1)]
    key = "; ".join(f"{number}: {kind}" for number, kind in zip(numbers, kinds, strict=True))
    return "\n".join([table(numbers, "", width), *textwrap.wrap(key, width, initial_indent=" ", subsequent_indent=" ")])


def _kind(choice: Choice) -> str:
    lacks = "" if choice.plan.fits else f", lacks {format_bytes(max(choice.plan.lacks_bytes, 0))}"
    return (choice.told or "chosen") + lacks


def _row(choice: Choice) -> tuple[str, ...]:
    answer, plan = choice.answer, choice.plan
    return (
        f"{answer.pipeline}·{answer.data}·{answer.tensor}",
        answer.order.schedule if answer.order is not None else "-",
        f"{answer.microbatches}·{plan.profile.samples}",
        _kept(choice) + (", moved" if answer.moved else ""),
        str(answer.zero or "-") + (", host" if answer.states_in_host else ""),
        format_seconds(choice.seconds),
        format_bytes(choice.peak),
    )


def misfit_line(chosen: Chosen, problem: PlanningProblem, tried: Sequence[tuple[str, int]]) -> str:
    """Why nothing fits: the layout that lacks least, and what would help.

    Args:
        chosen: what the search found; it does not fit.
        problem: what was searched.
        tried: changes with which something fits, each with its peak.
    """
    best, fullest = chosen.best, chosen.best.plan.fullest
    limit, parts = best.plan.limit_of(fullest), best.plan.rank_parts[fullest]
    largest = parts.largest()
    if best.answer.planner == "joint":
        ranks = f"{problem.ranks} rank{'s' if problem.ranks > 1 else ''}"
        told = f"no layout of {ranks} fits {format_bytes(limit)}: the nearest needs"
    else:
        told = f"planner={best.answer.planner} chose a layout that does not fit {format_bytes(limit)}: it needs"
    told += (
        f" {format_bytes(best.peak)} ({_layout(best)}; the largest part is {largest}, "
        f"{format_bytes(getattr(parts, largest))})"
    )
    if best.answer.planner != "joint":
        return f"{told}. Try planner=joint."
    if problem.left_out:
        told += f"; not searched were {'; '.join(problem.left_out)}"
    helps = [f"{words} ({format_bytes(peak)})" for words, peak in tried]
    if not helps:
        return f"{told}. In vain were 2 to 8 times the ranks, ZeRO 3, offload.optimizer=cpu and precision=bf16_master."
    return f"{told}. Try {' or '.join(helps)}."


def chosen_document(chosen: Chosen, problem: PlanningProblem, words: Sequence[str]) -> dict[str, Any]:
    """What ``runner plan --json`` adds to the plan's document."""
    found: dict[str, Any] = {
        "chosen": dict(chosen.best.keys),
        "request": list(words),
        "searched": chosen.searched,
        "evaluated": chosen.evaluated,
        "complete": chosen.complete,
        "left_out": list(problem.left_out),
        "runners_up": [_document(each, chosen.best) for each in chosen.runners_up],
    }
    if not chosen.fits:
        best = chosen.best
        found["nearest"] = {
            "overrides": _words(best.keys),
            "peak_memory_bytes": best.peak,
            "lacks_bytes": best.plan.lacks_bytes,
        }
    return found


def _document(choice: Choice, best: Choice) -> dict[str, Any]:
    answer = choice.answer
    return {
        "kind": choice.told,
        "layout": {"pipeline": answer.pipeline, "data": answer.data, "tensor": answer.tensor},
        "schedule": answer.order.schedule if answer.order is not None else None,
        "step_seconds": choice.seconds,
        "peak_memory_bytes": choice.peak,
        "fits": choice.plan.fits,
        "undecided": is_undecided(best, choice),
        "overrides": _words(choice.keys),
    }


def _words(keys: Mapping[str, Any]) -> list[str]:
    return [f"{key}={'null' if value is None else str(value).replace(' ', '')}" for key, value in keys.items()]
