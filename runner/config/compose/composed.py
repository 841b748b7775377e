"""Hydra's composition of a request, and the files that it is made of."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config.compose.files import read_option
from runner.config.compose.layers import SHIPPED, Layer
from runner.errors import Problem, RequestError
from runner.targets import names_environment, with_environment

if TYPE_CHECKING:
    from hydra._internal.defaults_list import DefaultsList
    from omegaconf import DictConfig

__all__ = ["Composed", "compose_request", "shown_path"]

"""How the names of the package's option files begin where they are shown."""

_PRIMARY = "config"


@dataclass(frozen=True, slots=True)
class Composed:
    """A composed request.

    Args:
        container: all sections as plain values.
        used: the chosen option of every group.
        files: the option files, in the order in which they are laid over each other.
    """

    container: dict[str, Any]
    used: dict[str, str]
    files: tuple[Layer, ...]


def compose_request(choices: Mapping[str, str | None], settings: Iterable[str], roots: Sequence[Path]) -> Composed:
    """Compose options and settings.

    Args:
        choices: the chosen option of each group that does not have its default; None for no recipe.
        settings: overrides of keys, in Hydra's form.
        roots: the folders that hold options.

    Raises:
        RequestError: Hydra refuses them.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Without a recipe, Hydra uses its default. Quoted, a name such as 1 is no number.
    lines = [f"{group}={json.dumps(name)}" for group, name in choices.items() if name is not None]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            composed, ordered = _composed([*lines, *settings], roots)
            chosen = ordered.overrides.known_choices.items()
            _keep_environment(composed)
            container = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        raise RequestError([_told(error)]) from error
    assert isinstance(container, dict)
    found = [(str(each.config_path), str(each.package or "")) for each in ordered.defaults if each.config_path]
    used = {str(group): str(name) for group, name in chosen if name is not None}
    return Composed({str(key): value for key, value in container.items()}, used, tuple(_layers(found, roots)))


def _composed(lines: Sequence[str], roots: Sequence[Path]) -> tuple[DictConfig, DefaultsList]:
    """What ``hydra.compose`` does, without the options of Hydra itself, and with the list of the files that it makes.

    Hydra's own options are as many as a request's; beside them, the list would be made twice, of files read each time.
    """
    from hydra import version
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import CachingConfigRepository
    from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
    from hydra._internal.core_plugins.structured_config_source import StructuredConfigSource
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.utils import setup_globals
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from runner.config.compose.option_folder import OptionFolder

    version.setbase("1.3")
    setup_globals()  # ${now:...} in values
    loader = ConfigLoaderImpl(ConfigSearchPathImpl())
    loader.repository.get_sources()[:] = [
        *(OptionFolder("runner", str(root)) for root in roots),
        StructuredConfigSource("schema", "structured://"),
    ]
    repository = CachingConfigRepository(loader.repository)
    overrides = OverridesParser.create().parse_overrides([*lines])
    loader.validate_sweep_overrides_legal(overrides, RunMode.RUN, from_shell=False)
    ordered = create_defaults_list(repository, _PRIMARY, overrides, prepend_hydra=False, skip_missing=False)
    composed = loader._compose_config_from_defaults_list(ordered.defaults, repository)
    OmegaConf.set_struct(composed, True)
    loader._apply_overrides_to_config(ordered.config_overrides, composed)
    OmegaConf.set_struct(composed, False)
    return composed, ordered


def shown_path(path: Path, roots: Sequence[Path]) -> str:
    """An option file as it is shown: in the package for one that is shipped, else from the working directory."""
    if path.is_relative_to(roots[0]):
        return f"{SHIPPED}{path.relative_to(roots[0])}"
    return f"conf/{path.relative_to(roots[-1])}"


def _layers(places: Iterable[tuple[str, str]], roots: Sequence[Path]) -> Iterator[Layer]:
    """The files at these paths below a root, with the section that each fills."""
    for name, package in places:
        path = next((root / f"{name}.yaml" for root in roots if (root / f"{name}.yaml").is_file()), None)
        if path is None or name == _PRIMARY:
            continue
        content: dict[str, Any] = read_option(path)
        content.pop("defaults", None)
        for section in reversed(package.split(".") if package else []):
            content = {section: content}
        yield Layer(shown_path(path, roots), content)


def _keep_environment(composed: DictConfig) -> None:
    """Let arguments of the user's functions name variables of the environment, so that no file holds their values.

    :func:`runner.targets.with_environment` puts the values in their place where the functions are called. Here it only
    finds out in time that one is missing.
    """
    from omegaconf import DictConfig, OmegaConf

    for section in composed.values():
        kwargs = section.get("kwargs") if isinstance(section, DictConfig) else None
        if isinstance(kwargs, DictConfig):
            raw = OmegaConf.to_container(kwargs, resolve=False)
            with_environment(raw)
            section["kwargs"] = _escaped(raw)


def _escaped(value: Any) -> Any:
    """Values in which OmegaConf does not resolve what names the environment."""
    if isinstance(value, dict):
        return {key: _escaped(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_escaped(inner) for inner in value]
    return value.replace("${", r"\${") if names_environment(value) else value


def _told(error: Exception) -> Problem:
    """Hydra's error message without its traceback, for errors that our own checks did not find."""
    text = " ".join(str(error).split())
    key = getattr(error, "full_key", None) or "request"
    return Problem(str(key), "", text.rstrip("."))
