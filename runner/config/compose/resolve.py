"""Turns overrides into a :class:`RunConfig`: composed by Hydra, strictly checked, with all problems at once."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.compose.container import config_from_container, fingerprint, load, save, to_container
from runner.config.compose.files import check_file, read_option
from runner.config.compose.groups import RECIPE, clashes, config_roots, options, shipped_conf
from runner.config.compose.overrides import Request, expand, read_overrides
from runner.config.schema import RunConfig
from runner.errors import Problem, RequestError, raise_problems
from runner.optim.catalogue.registry import OPTIMIZERS

__all__ = [
    "DEFAULT_RECIPE",
    "config_from_container",
    "fingerprint",
    "load",
    "resolve",
    "resolve_sweep",
    "save",
    "to_container",
]

DEFAULT_RECIPE = "rudalle_tiny"

# If one of these keys is given, the group's option `custom` is chosen.
_TARGETS = {f"{group}.target": group for group in ("model", "data", "loss", "logger", "schedule")}

# Groups whose options may be kinds of a user's own, which need no name but their file's.
_OF_USERS = ("optimizer", "compression", "schedule")


def resolve(overrides: Sequence[str], *, working_directory: Path | None = None) -> RunConfig:
    """The complete configuration that ``overrides`` request.

    Args:
        overrides: Hydra's ``key=value`` and ``group=option``.
        working_directory: the folder whose ``conf/`` adds options to the package's; default the current one.

    Raises:
        RequestError: there are unknown keys or options, wrong types or unreadable files; it contains all of them.
    """
    roots = config_roots(working_directory if working_directory is not None else Path.cwd())
    request, problems = read_overrides(overrides, roots)
    raise_problems(problems)
    choices = _completed(request, roots)
    raise_problems(_file_problems(choices, roots))
    settings = [*_chosen_again(choices, request, roots), *request.settings]
    container, used = _compose(choices, settings, roots)
    raise_problems(_file_problems({group: name for group, name in used.items() if choices.get(group) != name}, roots))
    return config_from_container(_with_names_of_files(container, used))


def resolve_sweep(overrides: Sequence[str], *, working_directory: Path | None = None) -> list[list[str]]:
    """The jobs of a sweep in order, each as its own list of overrides; a recipe's own ``sweep`` varies fastest.

    Raises:
        RequestError: an override cannot be read, or a sweep has no value.
    """
    roots = config_roots(working_directory if working_directory is not None else Path.cwd())
    jobs, problems = expand(overrides, roots)
    raise_problems(problems)
    return [[*job, *more] for job in jobs for more in _recipe_sweep(job, roots)]


def _recipe_sweep(job: Sequence[str], roots: Sequence[Path]) -> list[list[str]]:
    """The overrides by which a job's recipe varies keys that the job does not name; one empty list if none."""
    chosen, _ = read_overrides(job, roots)
    recipe = chosen.choices.get(RECIPE)
    if recipe is None:
        return [[]]
    try:
        axes = read_option(options(RECIPE, roots)[recipe].path).get("sweep", {})
    except ValueError:
        return [[]]  # the problem is reported with all others
    named = {*chosen.choices, *chosen.named}
    varied = [[f"{key}={value}" for value in values] for key, values in axes.items() if key not in named]
    return [list(one) for one in itertools.product(*varied)]


def _completed(request: Request, roots: Sequence[Path]) -> dict[str, str | None]:
    """The request's choices with those that follow from them: custom targets, companions, the default recipe."""
    choices = dict(request.choices)
    for key, group in _TARGETS.items():
        if key in request.named:
            choices.setdefault(group, "custom")
    optimizer = OPTIMIZERS.get(str(choices.get("optimizer")))
    for companion, follows in optimizer.brings.items() if optimizer is not None else ():
        choices.setdefault(companion, follows)
    if not {"model", "data", RECIPE} & set(choices):
        return {**choices, RECIPE: DEFAULT_RECIPE}
    if choices.get("model") == "custom" and choices.get(RECIPE) is None:
        choices = {"loss": "auto", "optimizer": "auto", **choices}  # a LightningModule may define its own
    if "model" in choices and choices.get(RECIPE) is None:
        for group, name in _companions(str(choices["model"]), roots).items():
            choices.setdefault(group, name)
    return choices


def _companions(model: str, roots: Sequence[Path]) -> dict[str, str]:
    try:
        companions = read_option(options("model", roots)[model].path).get("goes_with")
    except ValueError:
        return {}  # the problem is reported with all others
    return {str(group): str(name) for group, name in companions.items()} if isinstance(companions, dict) else {}


def _file_problems(choices: dict[str, str | None], roots: Sequence[Path]) -> list[Problem]:
    problems: list[Problem] = []
    for group, name in choices.items():
        known = options(group, roots)
        if name is None:
            continue
        if name not in known:
            problems.append(Problem(group, name, "there is no such option", f"{group} has {', '.join(known)}"))
            continue
        problems += clashes(group, name, roots)
        problems += check_file(known[name].path, group, roots)
    return problems


def _chosen_again(choices: dict[str, str | None], request: Request, roots: Sequence[Path]) -> Iterator[str]:
    """Repeat the values of options named on the command line, so that they win over the recipe's values.

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
            yield from _leaves(group, content)


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
    for group in _OF_USERS:
        section = container.get(group)
        if isinstance(section, dict) and section.get("target") is not None and group in used:
            section.setdefault("name", used[group])
    return container


def _leaves(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield f"++{path}={json.dumps(value)}"


def _compose(
    choices: dict[str, str | None], settings: Iterable[str], roots: Sequence[Path]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Hydra's composition as a plain container, and the chosen option of every group."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Without a recipe, Hydra uses its default. Quoted, a name such as 1 is no number.
    lines = [f"{group}={json.dumps(name)}" for group, name in choices.items() if name is not None]
    lines += settings
    search = ",".join(json.dumps(f"file://{root}") for root in roots[1:])
    if search:
        lines.append(f"hydra.searchpath=[{search}]")
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(shipped_conf()), version_base="1.3"):
            warnings.simplefilter("ignore")
            composed = compose("config", overrides=lines, return_hydra_config=True)
            used = {str(group): str(name) for group, name in composed.hydra.runtime.choices.items() if name is not None}
            OmegaConf.set_struct(composed, False)
            del composed["hydra"]
            container = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise RequestError([_told(error)]) from error
    assert isinstance(container, dict)
    own = {group: name for group, name in used.items() if not group.startswith("hydra/")}
    return {str(key): value for key, value in container.items()}, own


def _told(error: Exception) -> Problem:
    """Hydra's error message without its traceback, for errors that our own checks did not find."""
    text = " ".join(str(error).split())
    key = getattr(error, "full_key", None) or "request"
    return Problem(str(key), "", text.rstrip("."))
