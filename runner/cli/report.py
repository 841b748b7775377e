"""``runner report``: tables and figures from the records of runs."""

from __future__ import annotations

import json
from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import EXIT_OK, Problem, raise_problems

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Print and write the report of one directory, or of several side by side.

    A job that SLURM has ended before it could say so is recorded first.

    Raises:
        RequestError: the directory holds no record, or the table of runs has no such column.
    """
    problems = list(arguments.problems)
    if not arguments.words:
        rule = "must be the directory of a run or of a sweep, several of them, or a folder of runs"
        problems.append(Problem("DIR", None, rule, fix="runner report outputs"))
    raise_problems(problems)
    from runner.launch.slurm.ended import complete_ended
    from runner.report.write import REPORT_DIRECTORY, report, tables

    named = arguments.value("allow")
    allowed = named.split(",") if named else ()
    places = [Path(word) for word in arguments.words]
    for place in places:
        complete_ended(place)
    found = report(places, sort=arguments.value("sort"), allowed=allowed)
    if arguments.switch("json"):
        print(json.dumps(found.to_json(), indent=2))
        return EXIT_OK
    from rich.console import Console

    console = Console()
    for table in tables(found, allowed).values():
        console.print(table)
    console.print(f"written to {found.directory / REPORT_DIRECTORY}", markup=False, highlight=False)
    return EXIT_OK
