"""The settings of a search by Optuna: the words ``hydra/sweeper=optuna``, ``hydra/sweeper/sampler=NAME`` and
``hydra.sweeper.KEY=VALUE``.

The names are those of Hydra's sweeper for Optuna, so that its users' commands still work. That package is not used: it
needs Optuna 2, and the runner asks and tells the study itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import metadata
from typing import TYPE_CHECKING, Any

from runner.errors import Problem, RequestError, did_you_mean, raise_problems
from runner.launch.hydra.settings import SWEEPER, chooses

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

__all__ = ["GRID", "SAMPLERS", "Direction", "SearchSettings", "search_settings"]

GRID = "grid"
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "nsgaii": "NSGAIISampler",
    "qmc": "QMCSampler",
    "gp": "GPSampler",
    GRID: "GridSampler",
}
"""The names of samplers, and Optuna's classes."""
_PREFIX = f"hydra.{SWEEPER}."
_REFUSED = {
    "storage": ("has no meaning here", "The study's journal lies in the sweep's directory, whence it goes on"),
    "search_space": ("is written as hydra.sweeper.params", "Hydra has given it up"),
}


class Direction(Enum):
    """Whether a smaller or a larger value is better."""

    minimize = "minimize"
    maximize = "maximize"


@dataclass
class SearchSettings:
    """The settings of one search.

    Args:
        sampler: arguments of the sampler's class; only those that were given.
        direction: whether the runs' losses are minimised or maximised.
        study_name: the name of the study; None: Optuna chooses one.
        n_trials: number of trials in all, those of earlier starts included.
        n_jobs: number of trials that are asked for, and run, at once.
        max_failure_rate: the share of failed trials among those that run at once, above which the search ends.
        params: further overrides with several values, by key.
        custom_search_space: ``module.function``, called with a configuration and each trial, which may ask for more.
    """

    sampler: dict[str, Any] = field(default_factory=dict)
    direction: Direction = Direction.minimize
    study_name: str | None = None
    n_trials: int = 20
    n_jobs: int = 2
    max_failure_rate: float = 0.0
    params: dict[str, Any] = field(default_factory=dict)
    custom_search_space: str | None = None
    sampler_name: str = "tpe"

    def sampler_for(self, known: int, choices: Mapping[str, Sequence[Any]]) -> BaseSampler:
        """The sampler of a study that knows some trials.

        A sampler with a seed would ask again for what it has asked for when the study is started again, so that its
        seed is then another one.

        Args:
            known: the number of trials that the study knows.
            choices: all values of each key; only a grid reads them.
        """
        import optuna

        make: Any = getattr(optuna.samplers, SAMPLERS[self.sampler_name])
        given = dict(self.sampler)
        if self.sampler_name == GRID:
            given["search_space"] = choices
        elif given.get("seed") is not None:
            given["seed"] += known
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            made: BaseSampler = make(**given)
        return made

    def problems(self) -> list[Problem]:
        """Problems with the sampler's name, its arguments and the numbers."""
        import optuna

        if self.sampler_name not in SAMPLERS:
            key, near = f"hydra/{SWEEPER}/sampler", did_you_mean(self.sampler_name, SAMPLERS) or "tpe"
            return [Problem(key, self.sampler_name, f"must be one of {', '.join(SAMPLERS)}", fix=f"{key}={near}")]
        known = inspect.signature(getattr(optuna.samplers, SAMPLERS[self.sampler_name])).parameters
        found = [
            _unknown(f"{_PREFIX}sampler.", key, value, known) for key, value in self.sampler.items() if key not in known
        ]
        found += [] if found else self._sampler_problems()
        for name, least in (("n_trials", 1), ("n_jobs", 1), ("max_failure_rate", 0)):
            if getattr(self, name) < least:
                found.append(Problem(f"{_PREFIX}{name}", getattr(self, name), f"must be at least {least}"))
        return found

    def _sampler_problems(self) -> list[Problem]:
        """A problem if the sampler's class refuses the values of its arguments, or lacks a package."""
        try:
            self.sampler_for(0, {"key": [0]})
        except (ImportError, TypeError, ValueError) as error:
            why = f"optuna.samplers.{SAMPLERS[self.sampler_name]}: {error}"
            return [Problem(f"{_PREFIX}sampler", dict(self.sampler), "must be arguments of the sampler", why)]
        return []


def search_settings(words: Sequence[str], name: str) -> SearchSettings:
    """The settings of a search.

    Args:
        words: the words about Hydra's plugins.
        name: the value of ``hydra.job.name``, to which the settings may refer.

    Raises:
        RequestError: no such sweeper, or Optuna is not installed, or it has no such setting.
    """
    own = [word for word in words if chooses(SWEEPER, [word])]
    chosen = [word.partition("=")[2] for word in own if word.startswith(f"hydra/{SWEEPER}=")]
    if chosen != ["optuna"]:
        key = f"hydra/{SWEEPER}"
        raise_problems([Problem(key, ", ".join(chosen) or None, "must be optuna", fix=f"{key}=optuna")])
    try:
        metadata.version("optuna")
    except metadata.PackageNotFoundError:
        rule, fix = "needs optuna, which is not installed", "pip install -e '.[optuna]'"
        raise_problems([Problem(f"hydra/{SWEEPER}", "optuna", rule, fix=fix)])
    settings = _read([word for word in own if word.startswith(_PREFIX)], name)
    for word in own:
        if word.startswith(f"hydra/{SWEEPER}/sampler="):
            settings.sampler_name = word.partition("=")[2]
    raise_problems(settings.problems())
    return settings


def _read(words: Sequence[str], name: str) -> SearchSettings:
    """The settings that ``hydra.sweeper.KEY=VALUE`` give."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    keys = [one.name for one in fields(SearchSettings) if one.name != "sampler_name"]
    found, asked = OmegaConf.create({"hydra": {"job": {"name": name}, SWEEPER: {}}}), ""
    problems = []
    try:
        for asked in words:
            (override,) = OverridesParser.create().parse_overrides([asked])
            key = override.get_key_element().lstrip("+").removeprefix(_PREFIX)
            first = key.partition(".")[0]
            if first in _REFUSED:
                problems.append(Problem(f"{_PREFIX}{first}", override.value(), *_REFUSED[first]))
            elif first not in keys:
                problems.append(_unknown(_PREFIX, first, override.value(), keys))
            elif first == "direction" and isinstance(override.value(), list):
                problems.append(Problem(f"{_PREFIX}direction", override.value(), "must be one", "A run has one loss"))
            else:
                OmegaConf.update(found, f"{_PREFIX}{key}", override.value(), force_add=True)
        raise_problems(problems)
        asked = " ".join(words)
        given: Any = OmegaConf.to_container(found, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(SearchSettings), given["hydra"][SWEEPER])
        made = OmegaConf.to_object(merged)
    except (HydraException, OmegaConfBaseException) as error:
        told = " ".join(str(error).split())
        raise RequestError([Problem(f"hydra.{SWEEPER}", asked, "cannot be set so", told)]) from error
    assert isinstance(made, SearchSettings)
    return made


def _unknown(prefix: str, key: str, value: Any, known: Any) -> Problem:
    near = did_you_mean(key, list(known))
    why = f"Known are {', '.join(name for name in known if name != 'self')}"
    return Problem(f"{prefix}{key}", value, "is no setting", why, f"{prefix}{near}={value}" if near else "")
