"""Turns the words of a command line into a checked configuration, by all rules that need no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runner.cli.arguments import Arguments
from runner.config.compose.groups import RECIPE
from runner.config.compose.resolve import INSTEAD_OF_RECIPE, keys_given, resolve_sweep, resolve_with_layers
from runner.config.links import with_measured_link
from runner.config.rules.sections import rules
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.launch.run.find_layout import asks_for_layout, checked_search
from runner.plan.requested_schedule import resolve_request, schedule_problems
from runner.plan.rules.asked import problems_of_keys
from runner.plan.rules.unread import unread_keys

__all__ = ["checked", "jobs_of", "merged", "problems_in"]


def merged(*lists: Iterable[Problem]) -> list[Problem]:
    """All problems in order. If several lists have a problem for one path, only those of the first list are kept."""
    found: list[Problem] = []
    for problems in lists:
        told = {problem.path for problem in found}
        found += [problem for problem in problems if problem.path not in told]
    return found


def problems_in(config: RunConfig) -> list[Problem]:
    """Problems that the rules of the sections and of the schedule find in a resolved configuration."""
    return merged(rules(config), schedule_problems(config))


def checked(
    overrides: Sequence[str], earlier: Sequence[Problem] = (), *, command: str = "", unread: list[str] | None = None
) -> RunConfig:
    """Resolve the overrides and check the configuration against every rule.

    Args:
        overrides: Hydra's.
        earlier: problems found before, e.g. with flags, to be reported together with the others.
        command: the command's name, with `` -m`` for a sweep.
        unread: gets a line for every key that was set and that the command does not read, or does not read all values
            of.

    Raises:
        RequestError: the request has problems; the error contains all of them.
    """
    try:
        config, layers = resolve_with_layers(overrides)
        config = with_measured_link(config)
    except RequestError as error:
        raise RequestError(merged(earlier, error.problems, _problems_of_others(overrides, error.problems))) from error
    raise_problems([*earlier, *problems_in(config)])
    if unread is not None:
        unread += _given_again(overrides)
        unread += [problem.line() for problem in unread_keys(config, keys_given(overrides, layers), command)]
    return config


def _problems_of_others(overrides: Sequence[str], found: Sequence[Problem]) -> list[Problem]:
    """Problems of the overrides without those that are refused already, so that a user meets all mistakes at once.

    What an override means may depend on one that is refused (an unknown model brings other data with it), so that only
    rules speak which read nothing else than the overrides that are left.
    """
    left = [line for line in overrides if not any(_is_about(problem, line) for problem in found)]
    if len(left) == len(overrides):
        return []
    named = {_key(line) for line in left}
    is_of_user = any(_key(line) in INSTEAD_OF_RECIPE for line in overrides)
    if is_of_user and not INSTEAD_OF_RECIPE & named:
        left.append(f"{RECIPE}=null")  # else the default recipe would come in, of which nobody has spoken
    try:
        return problems_of_keys(resolve_request(left), named)
    except RequestError:
        return []


def _given_again(overrides: Sequence[str]) -> list[str]:
    """A line for each key that has several values; Hydra takes the last one."""
    given: dict[str, list[str]] = {}
    for line in overrides:
        given.setdefault(_key(line), []).append(line.partition("=")[2])
    several = {key: list(dict.fromkeys(values)) for key, values in given.items() if len({*values}) > 1}
    return [f"{key} is given as {' and as '.join(values)}: the last one counts" for key, values in several.items()]


def _is_about(problem: Problem, line: str) -> bool:
    key = _key(line)
    return problem.value == line or problem.path.lstrip("+~") == key or problem.path.startswith((f"{key}.", f"{key}["))


def _key(line: str) -> str:
    return line.partition("=")[0].lstrip("+~")


def jobs_of(arguments: Arguments) -> list[list[str]]:
    """The override lists of a sweep's jobs; at least one job is a valid request.

    Raises:
        RequestError: a flag is wrong, the sweep cannot be expanded, or no job can start; with every problem.
    """
    try:
        jobs = resolve_sweep(arguments.words)
    except RequestError as error:
        raise RequestError([*arguments.problems, *error.problems]) from error
    raise_problems(arguments.problems)
    problems: list[Problem] = []
    for overrides in jobs:
        try:
            if asks_for_layout(overrides):
                checked_search(overrides)
            else:
                checked(overrides)
        except RequestError as error:
            problems += [problem for problem in error.problems if problem not in problems]
        else:
            return jobs
    raise RequestError(problems)
