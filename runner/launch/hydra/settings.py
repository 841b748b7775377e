"""The words of a sweep that choose and set Hydra's plugins; a launcher's are resolved against its schema."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from runner.errors import Problem, RequestError, raise_problems

__all__ = ["LAUNCHER", "SWEEPER", "chooses", "launcher_settings", "split_words"]

LAUNCHER, SWEEPER = "launcher", "sweeper"
_KINDS = (LAUNCHER, SWEEPER)
_OPTION, _PACKAGE, _EXTRA = "submitit_slurm", "hydra-submitit-launcher", "submitit"
"""The launcher that may be chosen, the package that contains it, and our extra that installs it."""


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words about Hydra's plugins, and the other words."""
    ours = [word for word in words if any(_is_about(kind, word) for kind in _KINDS)]
    return ours, [word for word in words if word not in ours]


def chooses(kind: str, words: Sequence[str]) -> bool:
    """Whether a word is about this kind of plugin."""
    return any(_is_about(kind, word) for word in words)


def _is_about(kind: str, word: str) -> bool:
    """Whether a word chooses a plugin of this kind, or an option of it, or sets one of its keys."""
    return word.startswith((f"hydra/{kind}=", f"hydra/{kind}/", f"hydra.{kind}."))


def launcher_settings(words: Sequence[str], name: str) -> dict[str, Any] | None:
    """Return the settings of ``hydra/launcher`` as plain values, or None if no word chooses a launcher.

    Args:
        words: see :func:`split_words`.
        name: the value of ``hydra.job.name``, to which the settings may refer.

    Raises:
        RequestError: the plugin is not installed, or it has no such setting.
    """
    own = [word for word in words if _is_about(LAUNCHER, word)]
    if not own:
        return None
    key = f"hydra/{LAUNCHER}"
    chosen = [word.partition("=")[2] for word in own if word.startswith(f"{key}=")]
    if chosen != [_OPTION]:
        raise_problems([Problem(key, ", ".join(chosen) or None, f"must be {_OPTION}", fix=f"{key}={_OPTION}")])
    try:
        metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        rule, fix = f"needs {_PACKAGE}, which is not installed", f"pip install -e '.[{_EXTRA}]'"
        raise_problems([Problem(key, _OPTION, rule, fix=fix)])
    return _composed(own, name)


def _composed(words: Sequence[str], name: str) -> dict[str, Any]:
    from hydra import compose, initialize
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with warnings.catch_warnings(), initialize(config_path=None, version_base="1.3"):
            warnings.simplefilter("ignore")
            composed = compose(overrides=[*words, f"hydra.job.name='{name}'"], return_hydra_config=True)
            container = OmegaConf.to_container(composed.hydra[LAUNCHER], resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        told = " ".join(str(error).split())
        raise RequestError([Problem(f"hydra.{LAUNCHER}", " ".join(words), "cannot be set so", told)]) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
