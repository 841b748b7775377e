"""``parallelism=auto`` in commands: the words of a request become those of the layout that was found."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.cli import screen
from runner.cli.files import write
from runner.config.compose.groups import shipped_conf
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_OK, DoesNotFitError

if TYPE_CHECKING:
    from runner.launch.run.find_layout import FoundLayout

__all__ = ["plan_layout", "words_with_layout"]

logger = logging.getLogger(__name__)

_GROUPS = {each.name for each in shipped_conf().iterdir() if each.is_dir()}


def plan_layout(words: Sequence[str], *, as_json: bool, recipe: str | None) -> int:
    """Print the layout that was found for ``runner plan``.

    Args:
        words: the command line, with ``parallelism=auto``.
        as_json: whether one JSON document is printed.
        recipe: the file into which the request is written; None: none.

    Returns:
        3 if nothing fits.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
    """
    found = _found(words)
    if recipe is not None and found.chosen.fits:
        _write_recipe(Path(recipe), found)
    print(json.dumps(_document(found), indent=2) if as_json else _text(found))
    return EXIT_OK if found.chosen.fits else EXIT_DOES_NOT_FIT


def words_with_layout(words: Sequence[str]) -> tuple[str, ...]:
    """The words of ``runner train`` with the layout that was found, which is told.

    Raises:
        RequestError: the request has problems, or no layout can be planned.
        DoesNotFitError: nothing fits.
    """
    from runner.plan.planners.told import chosen_lines

    found = _found(words)
    if not found.chosen.fits:
        raise DoesNotFitError(_misfit(found))
    for line in chosen_lines(found.chosen, found.problem, found.words):
        logger.info("%s", line)
    return found.words


def _found(words: Sequence[str]) -> FoundLayout:
    from runner.launch.run.find_layout import find_layout

    try:
        return find_layout(words, screen.under_way)
    finally:
        screen.under_way("")


def _misfit(found: FoundLayout) -> str:
    from runner.launch.run.find_layout import remedies
    from runner.plan.planners.told import misfit_line

    return misfit_line(found.chosen, found.problem, remedies(found))


def _text(found: FoundLayout) -> str:
    from runner.plan.planners.told import chosen_lines, runners_up_text

    columns = screen.width()
    if not found.chosen.fits:
        return screen.wrapped(_misfit(found), columns)
    lines = chosen_lines(found.chosen, found.problem, found.words)
    told = [screen.wrapped(line, columns, "  ") for line in lines[:-1]]
    return "\n".join([*told, lines[-1], runners_up_text(found.chosen, columns)]).rstrip("\n")


def _document(found: FoundLayout) -> dict[str, Any]:
    from runner.plan.planners.told import chosen_document

    document = found.chosen.best.plan.to_json() | chosen_document(found.chosen, found.words)
    if not found.chosen.fits:
        document["problems"] = [_misfit(found)]
    return document


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
