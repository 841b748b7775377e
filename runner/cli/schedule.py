"""``runner schedule``: draws the order of a pipeline's work. It needs no model and does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from runner.cli import screen
from runner.cli.arguments import Arguments
from runner.cli.files import unwritable, write
from runner.cli.request import checked
from runner.config.compose.resolve import expand
from runner.config.schema import RunConfig
from runner.errors import EXIT_OK, Problem, RequestError, raise_problems
from runner.plan.requested_schedule import costs_of, schedule_of
from runner.schedule.checking.schedule import check, why_of
from runner.schedule.simulation.clock import Costs
from runner.schedule.simulation.opportunistic import realised
from runner.schedule.steady import period
from runner.schedule.stream import repeat
from runner.schedule.values import Schedule

__all__ = ["run"]

_FILES = ("csv", "svg", "trace")
_WINDOWS_DRAWN = 4  # number of windows that are drawn of an asynchronous schedule, unless schedule.steps is set


class _Drawn(NamedTuple):
    """A schedule as it is drawn.

    Args:
        step: one step of it.
        schedule: one or several repetitions of the step; if it is asynchronous, some of its windows.
        costs: its durations.
    """

    step: Schedule
    schedule: Schedule
    costs: Costs


def run(arguments: Arguments) -> int:
    """Print the schedule as a text grid or, with ``--json``, as a JSON document, and write the requested files.

    Several schedules (``schedule=gpipe,1f1b``) are drawn on one time scale, or are a list of documents.
    """
    if arguments.switch("list"):
        raise_problems(arguments.problems)
        print(_catalogue(as_json=arguments.switch("json")))
        return EXIT_OK
    drawn = [_drawn(config) for config in _configs(arguments)]
    for flag in _FILES:
        file = arguments.value(flag)
        if file is not None:
            write(flag, Path(file), _content(flag, drawn))
    print(_as_json(drawn) if arguments.switch("json") else _text(drawn))
    return EXIT_OK


def _configs(arguments: Arguments) -> list[RunConfig]:
    """The checked requests, one for each combination of the values that keys have several of.

    Raises:
        RequestError: a request has problems; the error contains those of all requests.
    """
    jobs, problems = expand(arguments.words)
    several = len(jobs) > 1
    problems = [
        *arguments.problems,
        *problems,
        *unwritable(arguments, _FILES),
        *(_not_in_one_file(arguments) if several else ()),
    ]
    configs, unread = [], list[str]()
    single = [] if any(problem.path == "-m" for problem in problems) else [list(arguments.words)]
    for job in jobs if several else single:
        try:
            configs.append(checked(job, command="schedule", unread=unread))
        except RequestError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    raise_problems(problems)
    screen.tell(dict.fromkeys(unread))
    return configs


def _not_in_one_file(arguments: Arguments) -> Iterator[Problem]:
    if (file := arguments.value("csv")) is not None:
        yield Problem("--csv", file, "takes one schedule", "The rows of the file are the ranks of one schedule")


def _drawn(config: RunConfig) -> _Drawn:
    costs, made = costs_of(config), schedule_of(config)
    raise_problems([Problem("schedule", made.name, defect, why_of(defect)) for defect in check(made)])
    step = realised(made, costs)
    windows = config.schedule.steps or (_WINDOWS_DRAWN if step.is_asynchronous else 1)
    return _Drawn(step, repeat(step, windows), costs)


def _content(flag: str, drawn: Sequence[_Drawn]) -> str:
    """The content of the file of ``--csv``, ``--svg`` or ``--trace``."""
    from runner.schedule.render import schedules_svg, schedules_trace, to_csv

    if flag == "csv":
        step, schedule, _ = drawn[0]
        # What schedule=from_file reads is one step; an asynchronous schedule has no step of its own.
        return to_csv(schedule if step.is_asynchronous else step)
    timelines = [(each.schedule, each.costs) for each in drawn]
    return schedules_svg(timelines) if flag == "svg" else json.dumps(schedules_trace(timelines)) + "\n"


def _text(drawn: Sequence[_Drawn]) -> str:
    from runner.schedule.render import schedules_text

    return schedules_text([(each.schedule, each.costs) for each in drawn], screen.width())


def _as_json(drawn: Sequence[_Drawn]) -> str:
    documents = [_document(_content_of(each)) for each in drawn]
    return documents[0] if len(documents) == 1 else "[" + ",\n".join(documents) + "]"


def _content_of(drawn: _Drawn) -> dict[str, Any]:
    from runner.schedule.render import to_json

    step, schedule, costs = drawn
    is_repeated = schedule.windows > step.windows or step.is_asynchronous
    return to_json(schedule, costs, period=period(step, costs) if is_repeated else None)


def _catalogue(*, as_json: bool) -> str:
    from runner.schedule.render.catalogue import catalogue_json, catalogue_text

    if not as_json:
        return screen.wrapped_lines(catalogue_text())
    return "[" + ",\n ".join(map(json.dumps, catalogue_json())) + "]"


def _document(content: dict[str, Any]) -> str:
    """JSON with one line per key: on a single line it is unreadable, and indented it has a thousand lines."""
    return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()) + "}"
