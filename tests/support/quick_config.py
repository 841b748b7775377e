"""Configurations that differ in few keys, without a composition by Hydra for each."""

from __future__ import annotations

from omegaconf import OmegaConf

from runner.config.compose.container import config_from_container, to_container
from runner.config.schema import RunConfig

__all__ = ["changed"]


def changed(config: RunConfig, *words: str) -> RunConfig:
    """``config`` with other values of keys, ``KEY=VALUE``; an option of a group is no such value."""
    merged = OmegaConf.merge(to_container(config), OmegaConf.from_dotlist(list(words)))
    return config_from_container(OmegaConf.to_container(merged))  # type: ignore[arg-type]  # it is a mapping
