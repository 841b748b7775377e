"""``runner plan``: check, cut and predict, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from runner.cli.arguments import Arguments
from runner.cli.request import checked, jobs_of
from runner.errors import EXIT_DOES_NOT_FIT, EXIT_OK, RequestError

if TYPE_CHECKING:
    from runner.plan.values import RunPlan

__all__ = ["run"]


def run(arguments: Arguments) -> int:
    """Print the plan, or with ``-m`` one per job.

    Returns:
        3 where a rank needs more than its memory; a sweep of plans is done when it is printed.

    Raises:
        RequestError: with every problem, unless the document of ``--json`` tells them.
    """
    as_json = arguments.switch("json")
    if arguments.switch("multirun"):
        return _run_sweep(jobs_of(arguments), as_json=as_json)
    try:
        plan = _plan(arguments.words, arguments)
    except RequestError as error:
        if as_json:
            print(json.dumps(_refused(error), indent=2))
        raise
    from runner.plan.render import to_table

    document = plan.to_json()
    if arguments.switch("why"):
        document["why"] = _why(arguments.words)
    print(json.dumps(document, indent=2) if as_json else to_table(plan))
    if arguments.switch("why") and not as_json:
        print(*document["why"]["rules"], json.dumps(document["why"]["deepspeed"], indent=2), sep="\n")
    return EXIT_OK if plan.fits else EXIT_DOES_NOT_FIT


def _why(overrides: Sequence[str]) -> dict[str, Any]:
    """The rules that were checked, and DeepSpeed's configuration where there is one."""
    from runner.config.compose.resolve import resolve
    from runner.config.deepspeed import deepspeed_settings
    from runner.config.rules.zero_table import compatibility_lines
    from runner.model.device import device_type
    from runner.plan.requested_schedule import executed_schedule, is_chosen_by_plan
    from runner.plan.zero_rules import shares_by_itself

    config = resolve(overrides)
    settings = None
    known = not is_chosen_by_plan(config)
    if config.zero.stage is not None and not (known and shares_by_itself(config, executed_schedule(config))):
        settings = deepspeed_settings(config, accelerated=device_type(config) == "cuda")
    return {"rules": compatibility_lines(config), "deepspeed": settings}


def _run_sweep(jobs: Sequence[Sequence[str]], *, as_json: bool) -> int:
    from runner.plan.render import to_table

    documents: list[dict[str, Any]] = []
    target = _plan_report(jobs)
    for overrides in jobs:
        title = " ".join(overrides)
        try:
            plan = _plan(overrides)
        except RequestError as error:
            documents.append({"overrides": list(overrides), **_refused(error)})
            text = str(error)
        else:
            documents.append({"overrides": list(overrides), **plan.to_json()})
            text = to_table(plan)
        if not as_json:
            print(f"{title}\n{text}\n")
    if as_json:
        print(json.dumps(documents, indent=2))
    elif target is not None:
        print(_reported(target, documents))
    return EXIT_OK


def _plan_report(jobs: Sequence[Sequence[str]]) -> str | None:
    """The function that a sweep's plans are handed to: the first that a job names."""
    from runner.config.compose.resolve import resolve

    for overrides in jobs:
        with suppress(RequestError):
            return resolve(overrides).plan_report
    return None


def _reported(target: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """What the function makes of them, as text."""
    from runner.model.targets import import_target
    from runner.report.tables import TextTable

    made = import_target("plan_report", target)(documents)
    rows = tuple(tuple(row) for row in made["rows"])
    return TextTable(made["title"], tuple(made["header"]), rows, (), (), tuple(made["notes"])).markdown()


def _plan(overrides: Sequence[str], arguments: Arguments | None = None) -> RunPlan:
    config = checked(overrides, arguments.problems if arguments is not None else ())
    from runner.plan.make import make_plan
    from runner.profiling.model import profile_model

    return make_plan(config, profile_model(config), profile_of=profile_model)


def _refused(error: RequestError) -> dict[str, Any]:
    return {"fits": False, "problems": [problem.line() for problem in error.problems]}
