"""``parallelism=auto`` in commands: the words of a request become those of the layout that was found."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli import screen
from runner.cli.files import write
from runner.config.compose.groups import shipped_conf
from runner.config.compose.length_notes import length_notes
from runner.config.units import format_bytes, format_seconds
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_OK
from runner.plan.requested_schedule import resolve_request
from runner.progress import doing, now

if TYPE_CHECKING:
    from runner.launch.run.find_layout import Compared, FoundLayout
    from runner.launch.run.largest_batch import LargestBatch

__all__ = ["compare", "found_layout", "plan_layout", "words_with_batch", "words_with_layout"]

_GROUPS = {each.name for each in shipped_conf().iterdir() if each.is_dir()}


def plan_layout(
    words: Sequence[str], *, as_json: bool, recipe: str | None, why: bool, more: Mapping[str, Any] | None = None
) -> int:
    """Print the layout that was found for ``runner plan``.

    Args:
        words: the command line, with ``parallelism=auto``.
        as_json: whether one JSON document is printed.
        recipe: the file into which the request is written; None: none.
        why: whether the best plan with another value of each free key is told.
        more: what else the document has.

    Returns:
        3 if nothing fits.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
    """
    found = found_layout(words, every_degree=why)
    if recipe is not None and found.chosen.fits:
        _write_recipe(Path(recipe), found)
    document = json.dumps(_document(found, why=why) | dict(more or {}), indent=2) if as_json else None
    print(document if document is not None else _text(found, why=why))
    return EXIT_OK if found.chosen.fits else EXIT_DOES_NOT_FIT


def compare(words: Sequence[str], *, as_json: bool) -> int:
    """Print what every planner makes of a request."""
    from runner.launch.run.find_layout import AUTO, asks_for_layout, compare_planners

    asked = words if asks_for_layout(words) else [*words, AUTO]
    with doing(screen.PLANNING):
        rows = compare_planners(asked, now)
    if as_json:
        print(json.dumps([_compared(row) for row in rows], indent=2))
        return EXIT_OK
    from runner.plan.render import table_text

    header = ("planner", "search", "its step", "planned", "peak", "fits", "layout or why not")
    print(table_text("", header, [_cells(row) for row in rows], screen.width(), left=1).rstrip("\n"))
    return EXIT_OK


def _compared(row: Compared) -> dict[str, Any]:
    plan = row.plan
    return {
        "planner": row.planner,
        "search_seconds": row.search_seconds,
        "evaluated": row.evaluated,
        "own_prediction": row.own_prediction,
        "step_seconds": plan.time.step_seconds if plan is not None else None,
        "peak_memory_bytes": max(plan.peak_memory_bytes) if plan is not None else None,
        "fits": plan.fits if plan is not None else None,
        "runnable": plan is not None and plan.fits,
        "why_not": row.why_not or ("it does not fit" if plan is not None and not plan.fits else None),
        "overrides": list(row.overrides),
    }


def _cells(row: Compared) -> tuple[str, ...]:
    plan = row.plan
    own = format_seconds(row.own_prediction) if row.own_prediction is not None else "-"
    search = f"{row.search_seconds:.2g} s"
    if plan is None:
        return row.planner, search, own, "-", "-", "-", row.why_not
    from runner.plan.planners.told import order_text

    layout = "·".join(str(plan.layout[axis]) for axis in ("pipeline", "data", "tensor"))
    told = f"{layout} {order_text(plan)} T={plan.schedule.microbatches}"
    seconds, peak = format_seconds(plan.time.step_seconds), format_bytes(max(plan.peak_memory_bytes))
    return row.planner, search, own, seconds, peak, "yes" if plan.fits else "no", told


def words_with_layout(words: Sequence[str]) -> tuple[str, ...]:
    """See :func:`runner.launch.run.take_layout.words_with_layout`; a terminal says meanwhile how far the search is."""
    from runner.launch.run import take_layout

    with doing(screen.PLANNING):
        return take_layout.words_with_layout(words, now)


def words_with_batch(words: Sequence[str]) -> LargestBatch:
    """The words of a request with ``data.batch_size=max``, with the size that was found.

    Raises:
        RequestError: the request has problems.
        DoesNotFitError: no size fits.
    """
    from runner.launch.run.largest_batch import largest_batch

    with doing(screen.PLANNING):
        return largest_batch(words, now)


def found_layout(words: Sequence[str], *, every_degree: bool = False) -> FoundLayout:
    """Search the layout of a request; a terminal says meanwhile how far the search is.

    Args:
        words, every_degree: see :func:`runner.launch.run.find_layout.find_layout`.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
    """
    from runner.launch.run.find_layout import find_layout

    with doing(screen.PLANNING):
        return find_layout(words, now, every_degree=every_degree)


def _text(found: FoundLayout, *, why: bool) -> str:
    from runner.launch.run.take_layout import misfit
    from runner.plan.planners.told import chosen_lines, other_value_lines, runners_up_text

    columns = screen.width()
    if not found.chosen.fits:
        return screen.wrapped(misfit(found), columns)
    lines = chosen_lines(found.chosen, found.problem, found.words)
    notes = [f"note: {line}" for line in length_notes(resolve_request(found.words))]
    told = [screen.wrapped(line, columns, "  ") for line in (*lines[:-1], *notes)]
    table = runners_up_text(found.chosen, columns).rstrip("\n")
    others = (
        ["the best plan with another value, of those that were made:", *other_value_lines(found.chosen)] if why else []
    )
    return "\n".join([*told, lines[-1], *([table] if table else []), *others])


def _document(found: FoundLayout, *, why: bool) -> dict[str, Any]:
    from runner.launch.run.take_layout import misfit
    from runner.plan.planners.told import chosen_document, other_values

    document = found.chosen.best.plan.to_json() | chosen_document(found.chosen, found.problem, found.words)
    if not found.chosen.fits:
        document["problems"] = [misfit(found)]
    return document | ({"why": other_values(found.chosen)} if why else {})


def _write_recipe(file: Path, found: FoundLayout) -> None:
    """Write the request as a recipe: ``recipe=NAME`` takes the file from ``conf/recipe`` of the working directory."""
    import yaml

    groups, keys = list[dict[str, Any]](), dict[str, Any]()
    for word in found.words:
        key, _, text = word.lstrip("+").partition("=")
        value = yaml.safe_load(text)
        if "." not in key and key in _GROUPS:
            groups.append({f"override /{key}": value})
            continue
        *sections, name = key.split(".")
        place = keys
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    body = yaml.safe_dump({"defaults": groups, **keys}, sort_keys=False, allow_unicode=True)
    write("write", file, f"# @package _global_\n# {shlex.join(['runner', 'train', *found.words])}\n{body}")
