"""The command-line words of a sweep that choose and set Hydra's plugins, resolved against the plugins' schemas."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from runner.errors import Problem, RequestError, raise_problems

__all__ = ["LAUNCHER", "SWEEPER", "chooses", "plugin_settings", "split_words"]

LAUNCHER, SWEEPER = "launcher", "sweeper"
# Kind of plugin to the option that may be chosen, the package that contains it, and our extra that installs it.
_PLUGINS = {
    LAUNCHER: ("submitit_slurm", "hydra-submitit-launcher", "submitit"),
    SWEEPER: ("optuna", "hydra-optuna-sweeper", "optuna"),
}


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words about Hydra's plugins, and the other words."""
    ours = [word for word in words if any(_is_about(kind, word) for kind in _PLUGINS)]
    return ours, [word for word in words if word not in ours]


def chooses(kind: str, words: Sequence[str]) -> bool:
    """Whether a word is about this kind of plugin."""
    return any(_is_about(kind, word) for word in words)


def _is_about(kind: str, word: str) -> bool:
    """Whether a word chooses a plugin of this kind, or an option of it, or sets one of its keys."""
    return word.startswith((f"hydra/{kind}=", f"hydra/{kind}/", f"hydra.{kind}."))


def plugin_settings(kind: str, words: Sequence[str], name: str) -> dict[str, Any] | None:
    """Return the settings of ``hydra/<kind>`` as plain values, or None if no word chooses such a plugin.

    Args:
        kind: the kind of plugin, e.g. ``launcher``.
        words: see :func:`split_words`.
        name: the value of ``hydra.job.name``, to which the settings may refer.

    Raises:
        RequestError: the plugin is not installed, or it has no such setting.
    """
    own = [word for word in words if _is_about(kind, word)]
    if not own:
        return None
    chosen = [word.partition("=")[2] for word in own if word.startswith(f"hydra/{kind}=")]
    known, package, extra = _PLUGINS[kind]
    if chosen != [known]:
        asked = ", ".join(chosen) or None
        raise_problems([Problem(f"hydra/{kind}", asked, f"must be {known}", fix=f"hydra/{kind}={known}")])
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        rule, fix = f"needs {package}, which is not installed", f"pip install -e '.[{extra}]'"
        raise_problems([Problem(f"hydra/{kind}", chosen[0], rule, fix=fix)])
    return _composed(kind, own, name)


def _composed(kind: str, words: Sequence[str], name: str) -> dict[str, Any]:
    from hydra import compose, initialize
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with warnings.catch_warnings(), initialize(config_path=None, version_base="1.3"):
            warnings.simplefilter("ignore")
            composed = compose(overrides=[*words, f"hydra.job.name='{name}'"], return_hydra_config=True)
            container = OmegaConf.to_container(composed.hydra[kind], resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        told = " ".join(str(error).split())
        raise RequestError([Problem(f"hydra.{kind}", " ".join(words), "cannot be set so", told)]) from error
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
