"""``runner report``: tables and figures from the records of runs."""

from __future__ import annotations

import json
from pathlib import Path

from runner.cli.arguments import Arguments
from runner.errors import EXIT_OK, Problem, raise_problems

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Print and write the report of one directory. A job that SLURM has ended before it could say so is recorded first.

    Raises:
        RequestError: the directory holds no record, or the table of runs has no such column.
    """
    problems = list(arguments.problems)
    if len(arguments.words) != 1:
        asked = " ".join(arguments.words) or None
        rule = "must be one directory of a run or of a sweep"
        problems.append(Problem("DIR", asked, rule, fix="runner report outputs/NAME/TIME"))
    raise_problems(problems)
    from runner.launch.slurm.ended import complete_ended
    from runner.report.write import REPORT_DIRECTORY, report, tables

    named = arguments.value("allow")
    allowed = named.split(",") if named else ()
    complete_ended(Path(arguments.words[0]))
    found = report(Path(arguments.words[0]), sort=arguments.value("sort"), allowed=allowed)
    if arguments.switch("json"):
        print(json.dumps(found.to_json(), indent=2))
        return EXIT_OK
    from rich.console import Console

    console = Console()
    for table in tables(found, allowed).values():
        console.print(table)
    console.print(f"written to {found.directory / REPORT_DIRECTORY}", markup=False, highlight=False)
    return EXIT_OK
