"""``runner schedule``: draws the order of a pipeline's work. It needs no model and does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runner.cli.arguments import Arguments
from runner.cli.request import checked
from runner.errors import EXIT_OK, Problem, RequestError, raise_problems
from runner.plan.requested_schedule import costs_of, schedule_of
from runner.schedule.simulation.clock import Costs
from runner.schedule.simulation.opportunistic import realised
from runner.schedule.simulation.steady import period
from runner.schedule.stream import repeat
from runner.schedule.values import Schedule

__all__ = ["run"]

_FILES = ("csv", "svg", "trace")
_WINDOWS_DRAWN = 4  # number of windows that are drawn of an asynchronous schedule, unless schedule.steps is set


def run(arguments: Arguments) -> int:
    """Print the schedule as a text grid or, with ``--json``, as a JSON document, and write the requested files."""
    if arguments.switch("list"):
        raise_problems(arguments.problems)
        print(_catalogue(as_json=arguments.switch("json")))
        return EXIT_OK
    config = checked(arguments.words, [*arguments.problems, *_unwritable(arguments)])
    costs = costs_of(config)
    step = realised(schedule_of(config), costs)
    schedule = repeat(step, config.schedule.steps or (_WINDOWS_DRAWN if step.is_asynchronous else 1))
    for flag in _FILES:
        file = arguments.value(flag)
        if file is not None:
            # What schedule=from_file reads is one step; an asynchronous schedule has no step of its own.
            shown = step if flag == "csv" and not step.is_asynchronous else schedule
            _write(flag, Path(file), _content(flag, shown, costs))
    print(_shown(step, schedule, costs, as_json=arguments.switch("json")))
    return EXIT_OK


def _unwritable(arguments: Arguments) -> list[Problem]:
    files = [(flag, Path(file)) for flag in _FILES if (file := arguments.value(flag)) is not None]
    return [
        Problem(f"--{flag}", file, "must be a file in a folder that exists", fix=f"--{flag} {file.name}")
        for flag, file in files
        if file.is_dir() or not file.absolute().parent.is_dir()
    ]


def _write(flag: str, file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError([Problem(f"--{flag}", file, "cannot be written", str(error))]) from error


def _content(flag: str, schedule: Schedule, costs: Costs) -> str:
    """The content of the file of ``--csv``, ``--svg`` or ``--trace``."""
    from runner.schedule.render import to_csv, to_svg, to_trace

    if flag == "csv":
        return to_csv(schedule)
    if flag == "svg":
        return to_svg(schedule, costs)
    return json.dumps(to_trace(schedule, costs)) + "\n"


def _shown(step: Schedule, schedule: Schedule, costs: Costs, *, as_json: bool) -> str:
    """The text or JSON of ``schedule``: one ``step`` or several repetitions of it; if asynchronous, some of its
    windows.
    """
    from runner.schedule.render import to_json, to_text

    if not as_json:
        return to_text(schedule, costs)
    is_repeated = schedule.windows > step.windows or step.is_asynchronous
    return _document(to_json(schedule, costs, period=period(step, costs) if is_repeated else None))


def _catalogue(*, as_json: bool) -> str:
    from runner.schedule.render.catalogue import catalogue_json, catalogue_text

    if not as_json:
        return catalogue_text()
    return "[" + ",\n ".join(map(json.dumps, catalogue_json())) + "]"


def _document(content: dict[str, Any]) -> str:
    """JSON with one line per key: on a single line it is unreadable, and indented it has a thousand lines."""
    return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "}"
