"""Renders the plans of a sweep as one sorted table."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runner.config.short_names import short_names
from runner.config.units import format_bytes, format_rate, format_seconds
from runner.errors import Problem
from runner.plan.render import table_text
from runner.plan.values import RunPlan

__all__ = ["SweepRow", "sweep_text"]

_UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One job of a sweep of plans.

    Args:
        overrides: its overrides.
        plan: its plan; None if the request was refused.
        problems: the reasons for the refusal.
        found: where its layout was left to the search, the words that ask for the one that was found.
        lack: why the one that was found does not fit, and what would help; empty if it fits.
    """

    overrides: Sequence[str]
    plan: RunPlan | None = None
    problems: Sequence[Problem] = ()
    found: Sequence[str] = ()
    lack: str = ""


def sweep_text(rows: Sequence[SweepRow], width: int) -> str:
    """A table with what fits first and the fastest on top, and below it why jobs were refused.

    Args:
        rows: the jobs, in any order.
        width: the longest line.
    """
    common = [word for word in rows[0].overrides if all(word in row.overrides for row in rows)]
    names = [
        name or "all" for name in short_names([[word for word in row.overrides if word not in common] for row in rows])
    ]
    named = sorted(zip(names, rows, strict=True), key=lambda each: _order(each[1]))
    in_tokens = all(row.plan.work.tokens for row in rows if row.plan is not None)
    title = "\n".join(textwrap.wrap(f"{len(rows)} plans of {' '.join(common)}", width, break_on_hyphens=False))
    columns = ("layout", "step", "tokens/s" if in_tokens else "samples/s", "peak", "fits")
    cells = [(name, *_cells(row, in_tokens=in_tokens)) for name, row in named]
    below = (*_disturbed(named, width), *_found(named, width), *_refusals(dict(named), width))
    return "\n".join([title, table_text("", columns, cells, width, left=1), *below])


def _order(row: SweepRow) -> tuple[bool, bool, float]:
    if row.plan is None:
        return True, True, 0.0
    return False, not row.plan.fits, -(row.plan.work.samples_per_second(row.plan.time.step_seconds) or 0.0)


def _cells(row: SweepRow, *, in_tokens: bool) -> tuple[str, ...]:
    plan = row.plan
    if plan is None:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN, "refused"
    seconds = plan.time.step_seconds
    rate = plan.work.tokens_per_second(seconds) if in_tokens else plan.work.samples_per_second(seconds)
    shown = format_rate(rate) if rate else _UNKNOWN
    return format_seconds(seconds), shown, format_bytes(max(plan.peak_memory_bytes)), "yes" if plan.fits else "no"


def _disturbed(named: Sequence[tuple[str, SweepRow]], width: int) -> Iterator[str]:
    """Yield which steps were measured while other work took turns, as they compare badly with the others."""
    for name, row in named:
        if row.plan is not None and row.plan.time.source == "measured" and row.plan.profile.is_disturbed:
            share = f"other work took {row.plan.profile.busy_share:.0%} of a core while its layers were measured"
            text = f"{name}: {share}, so that its step may be shorter"
            yield textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def _found(named: Sequence[tuple[str, SweepRow]], width: int) -> Iterator[str]:
    """Yield the command of each layout that was found, in a line that can be copied, and why others do not fit."""
    for name, row in named:
        if row.lack:
            yield textwrap.fill(f"{name}: {row.lack}", width, subsequent_indent="  ", break_on_hyphens=False)
        if row.found and row.plan is not None and row.plan.fits:
            yield f"{name}: runner train {shlex.join(row.found)}"


def _refusals(named: Mapping[str, SweepRow], width: int) -> Iterator[str]:
    """Yield each problem once, with the jobs that have it."""
    jobs: dict[str, list[str]] = {}
    for name, row in named.items():
        for problem in row.problems:
            jobs.setdefault(problem.line(), []).append(name)
    for line, names in jobs.items():
        text = f"refused: {', '.join(names)}: {line}"
        yield textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
