"""Overrides for a request that was resolved before, such as another layout for an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from runner.config.compose.container import config_from_container
from runner.config.compose.files import check_file, read_option
from runner.config.compose.groups import RECIPE, config_roots, options
from runner.config.compose.overrides import read_overrides, settings_of
from runner.config.schema import RunConfig
from runner.errors import Problem, raise_problems

__all__ = ["amended"]


def amended(
    container: Mapping[str, Any], overrides: Sequence[str], *, working_directory: Path | None = None
) -> RunConfig:
    """The configuration in a container with overrides; the option of a group replaces the group's whole section.

    Args:
        container: a resolved request as plain values; absent keys take the schema's defaults.
        overrides: Hydra's ``key=value`` and ``group=option``, without a recipe.
        working_directory: the folder whose ``conf/`` adds options to the package's; default the current one.

    Raises:
        RequestError: there are unknown keys or options, or wrong types; it contains all of them.
    """
    roots = config_roots(working_directory if working_directory is not None else Path.cwd())
    request, problems = read_overrides(overrides, roots)
    why = "The request is used as it is, but for keys that are set"
    problems = [*problems, *(Problem(word, None, "must be left out", why) for word in overrides if word[:1] == "~")]
    recipe = request.choices.get(RECIPE)
    if recipe is not None:
        problems = [*problems, Problem(RECIPE, recipe, "must be left out", "The run's own request is used")]
    raise_problems(problems)
    made = deepcopy(dict(container))
    for group, name in request.choices.items():
        path = options(group, roots)[str(name)].path
        raise_problems(check_file(path, group, roots))
        content = read_option(path)
        content.pop("defaults", None)
        made[group] = content
    for key, value in settings_of(request):
        _put(made, key.split("."), value)
    return config_from_container(made)


def _put(container: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    for key in keys[:-1]:
        container = container.setdefault(key, {})
    container[keys[-1]] = value
