"""Turns overrides into a :class:`RunConfig`: composed by Hydra, strictly checked, with all problems at once."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.compose.composed import compose_request, shown_path
from runner.config.compose.container import config_from_container, fingerprint, load, save, to_container
from runner.config.compose.files import check_file, read_option, sweep_of
from runner.config.compose.groups import OF_USERS, RECIPE, clashes, config_roots, options
from runner.config.compose.layers import (
    SHIPPED,
    Layer,
    leaves,
    sizes_of_folder,
    without_arguments_of_others,
    without_sizes_of_fresh_models,
)
from runner.config.compose.overrides import Request, axes_of, read_overrides, typed_layers
from runner.config.compose.synonyms import no_option
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.optim.catalogue.registry import OPTIMIZERS

__all__ = [
    "DEFAULT_RECIPE",
    "INSTEAD_OF_RECIPE",
    "config_from_container",
    "expand",
    "fingerprint",
    "keys_given",
    "load",
    "resolve",
    "resolve_sweep",
    "resolve_with_layers",
    "save",
    "to_container",
]

DEFAULT_RECIPE = "rudalle_tiny"

INSTEAD_OF_RECIPE = frozenset(("model", "data", RECIPE, "model.target", "data.target"))
"""A request that names none of these groups and keys is one for the default recipe."""

# If one of these keys is given, the group's option `custom` is chosen.
_TARGETS = {f"{group}.target": group for group in ("model", "data", "loss", "optimizer", "logger", "schedule")}


_STEPS, _EPOCHS = "trainer.max_steps", "trainer.max_epochs"


def resolve(overrides: Sequence[str], *, working_directory: Path | None = None) -> RunConfig:
    """The complete configuration that ``overrides`` request.

    Args:
        overrides: Hydra's ``key=value`` and ``group=option``.
        working_directory: the folder whose ``conf/`` adds options to the package's; default the current one.

    Raises:
        RequestError: there are unknown keys or options, wrong types or unreadable files; it contains all of them.
    """
    return resolve_with_layers(overrides, working_directory=working_directory)[0]


def resolve_with_layers(
    overrides: Sequence[str], *, working_directory: Path | None = None
) -> tuple[RunConfig, tuple[Layer, ...]]:
    """As :func:`resolve`, and the files and overrides that the configuration was made of, the winning ones last."""
    roots = config_roots(working_directory if working_directory is not None else Path.cwd())
    request, problems = read_overrides(overrides, roots)
    raise_problems([*problems, *_file_problems(request.choices, roots)] if problems else [])
    choices = _completed(request, roots)
    raise_problems(_file_problems(choices, roots))
    again = dict(_chosen_again(choices, request, roots))
    settings = [line for group, content in again.items() for line in _settings(group, content)]
    composed = compose_request(choices, [*settings, *_without_epochs(request), *request.settings], roots)
    used = composed.used
    raise_problems(_file_problems({group: name for group, name in used.items() if choices.get(group) != name}, roots))
    repeated = [
        Layer(shown_path(options(group, roots)[used[group]].path, roots), {group: content})
        for group, content in again.items()
    ]
    layers = (*composed.files, *repeated, *typed_layers(request))
    container = without_arguments_of_others(composed.container, layers)
    container = without_sizes_of_fresh_models(container, layers)
    longer = sizes_of_folder(container, layers)
    if longer is not None:
        container["data"]["kwargs"].update(longer.content["data"]["kwargs"])
        layers = (*layers, longer)
    config = config_from_container(_with_names_of_files(container, used))
    raise_problems(_end_problems(config, request))
    return config, layers


def keys_given(overrides: Sequence[str], layers: Sequence[Layer]) -> dict[str, bool]:
    """The keys that a user has set, and the groups that were chosen; whether on the command line, not in a file.

    Args:
        overrides: the command line, which is a request.
        layers: what :func:`resolve_with_layers` returned for it. Files of the package are nothing that a user has set.
    """
    mine = [layer for layer in layers if layer.is_typed or not layer.source.startswith(SHIPPED)]
    found = {path: layer.is_typed for layer in mine for path, _ in leaves("", layer.content)}
    request, _ = read_overrides(overrides, config_roots(Path.cwd()))
    return found | dict.fromkeys(request.choices, True)


def resolve_sweep(overrides: Sequence[str], *, working_directory: Path | None = None) -> list[list[str]]:
    """The jobs of a sweep in order, each as its own list of overrides; a recipe's own ``sweep`` varies fastest.

    Raises:
        RequestError: an override cannot be read, a sweep has no value, or there are more jobs than ``sweep_most``.
    """
    roots = config_roots(working_directory if working_directory is not None else Path.cwd())
    jobs, problems = expand(overrides, working_directory=working_directory)
    raise_problems(problems)
    most = _most_jobs(jobs[0], working_directory)
    found = ([*job, *more] for job in jobs for more in _recipe_sweep(job, roots))
    listed = list(itertools.islice(found, most + 1))
    if len(listed) > most:
        raise_problems([_too_many(len(jobs) * len(_recipe_sweep(jobs[0], roots)), most)])
    return listed


def expand(overrides: Sequence[str], *, working_directory: Path | None = None) -> tuple[list[list[str]], list[Problem]]:
    """The product of the values on a command line, each as its list of overrides; without a recipe's own ``sweep``.

    It is counted before it is listed: there are no jobs and a problem if they are more than ``sweep_most``.
    """
    axes, problems = axes_of(
        overrides, config_roots(working_directory if working_directory is not None else Path.cwd())
    )
    if problems:
        return [], problems
    count = math.prod(axis.count for axis in axes)
    most = _most_jobs([next(axis.values()) for axis in axes], working_directory) if count > 1 else 1
    if count > most:
        return [], [_too_many(count, most)]
    return [list(job) for job in itertools.product(*(tuple(axis.values()) for axis in axes))], []


def _too_many(count: int, most: int) -> Problem:
    rule, why = f"must be at most sweep_most = {most}", "Each job is a run or a plan of its own"
    return Problem("-m", f"{count} jobs", rule, why, f"sweep_most={count}")


def _most_jobs(first: Sequence[str], working_directory: Path | None) -> int:
    """``sweep_most`` of a sweep, as its first job has it; the default if that job cannot be resolved."""
    try:
        return resolve(first, working_directory=working_directory).sweep_most
    except RequestError:
        return RunConfig().sweep_most


def _recipe_sweep(job: Sequence[str], roots: Sequence[Path]) -> list[list[str]]:
    """The overrides by which a job's recipe varies keys that the job does not name; one empty list if none."""
    chosen, _ = read_overrides(job, roots)
    recipe = chosen.choices.get(RECIPE)
    if recipe is None:
        return [[]]
    path = options(RECIPE, roots)[recipe].path
    try:
        axes, problems = sweep_of(path, read_option(path))
    except ValueError:
        return [[]]  # the problem is reported with all others
    raise_problems(problems)
    named = {*chosen.choices, *chosen.named}
    varied = [[f"{key}={value}" for value in values] for key, values in axes.items() if key not in named]
    return [list(one) for one in itertools.product(*varied)]


def _without_epochs(request: Request) -> list[str]:
    """The override that switches a recipe's epochs off, for a command line that names steps alone."""
    return [f"++{_EPOCHS}=null"] if _STEPS in request.named and _EPOCHS not in request.named else []


def _end_problems(config: RunConfig, request: Request) -> Iterator[Problem]:
    if config.trainer.max_epochs is not None and {_STEPS, _EPOCHS} <= request.named:
        why = f"{_STEPS} = {config.trainer.max_steps} is also named, and a run has one end"
        yield Problem(_EPOCHS, config.trainer.max_epochs, f"must be null beside {_STEPS}", why, f"{_EPOCHS}=null")


def _completed(request: Request, roots: Sequence[Path]) -> dict[str, str | None]:
    """The request's choices with those that follow from them: custom targets, companions, the default recipe."""
    choices = dict(request.choices)
    for key, group in _TARGETS.items():
        if key in request.named:
            choices.setdefault(group, "custom")
    optimizer = OPTIMIZERS.get(str(choices.get("optimizer")))
    for companion, follows in optimizer.brings.items() if optimizer is not None else ():
        choices.setdefault(companion, follows)
    for group in ("parallelism", "data"):
        for companion, follows in _companions(group, str(choices.get(group)), roots).items():
            choices.setdefault(companion, follows)
    if not INSTEAD_OF_RECIPE & set(choices):
        return {**choices, RECIPE: DEFAULT_RECIPE}
    if choices.get("model") == "custom" and choices.get(RECIPE) is None:
        choices = {"loss": "auto", "optimizer": "auto", **choices}  # a LightningModule may define its own
    if "model" in choices and choices.get(RECIPE) is None:
        for group, name in _companions("model", str(choices["model"]), roots).items():
            choices.setdefault(group, name)
    return choices


def _companions(group: str, name: str, roots: Sequence[Path]) -> dict[str, str]:
    """The options of other groups that an option file names as those it goes with."""
    try:
        companions = read_option(options(group, roots)[name].path).get("goes_with")
    except (KeyError, ValueError):
        return {}  # the problem is reported with all others
    return {str(group): str(name) for group, name in companions.items()} if isinstance(companions, dict) else {}


def _file_problems(choices: dict[str, str | None], roots: Sequence[Path]) -> list[Problem]:
    problems: list[Problem] = []
    for group, name in choices.items():
        known = options(group, roots)
        if name is None:
            continue
        if name not in known:
            problems.append(no_option(group, name, known))
            continue
        problems += clashes(group, name, roots)
        problems += check_file(known[name].path, group, roots)
    return problems


def _chosen_again(
    choices: dict[str, str | None], request: Request, roots: Sequence[Path]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Group and content of the options that are repeated: those of the command line win over the recipe's values.

    Hydra applies a recipe after every option; without this, a recipe's ``parallelism.pipeline: 2`` would win over
    ``parallelism=single``. Settings that Adam and related optimizers share are kept from the recipe, so that they can
    be compared.
    """
    recipe = choices.get(RECIPE)
    if recipe is None:
        return
    shared = _settings_of_adam(read_option(options(RECIPE, roots)[recipe].path))
    for group, name in request.choices.items():
        if group != RECIPE and name is not None:
            content = read_option(options(group, roots)[name].path)
            content.pop("defaults", None)
            if group == "optimizer" and _is_kin_of_adam(name):
                content = {key: value for key, value in content.items() if key == "name" or key not in shared}
            yield group, content


def _settings_of_adam(recipe: Mapping[str, Any]) -> Mapping[str, Any]:
    """The optimizer settings of a recipe whose optimizer is Adam or related to it; else empty."""
    chosen = [entry.get("override /optimizer") for entry in recipe.get("defaults", []) if isinstance(entry, dict)]
    own = next((name for name in chosen if name is not None), "adamw")
    settings: Mapping[str, Any] = recipe.get("optimizer", {})
    return settings if _is_kin_of_adam(str(own)) else {}


def _is_kin_of_adam(name: str) -> bool:
    return name in OPTIMIZERS and OPTIMIZERS[name].is_kin_of_adam


def _with_names_of_files(container: dict[str, Any], used: Mapping[str, str]) -> dict[str, Any]:
    """``container`` where a user's option that has a ``target``, and no ``name``, is named as its file."""
    for group in OF_USERS:
        section = container.get(group)
        if isinstance(section, dict) and section.get("target") is not None and group in used:
            section.setdefault("name", used[group])
    return container


def _settings(group: str, content: Mapping[str, Any]) -> Iterator[str]:
    for path, value in leaves(group, content):
        if value != {}:
            yield f"++{path}={json.dumps(value)}"
