"""The settings of an optimizer's parameter groups: learning rate, betas, decay, and whatever else is no parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

__all__ = ["apply_settings", "settings_of", "without_parameters"]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each parameter group's entries without its parameters."""
    return [without_parameters(group) for group in optimizer.param_groups]


def apply_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    """Give each parameter group the settings at its place.

    Raises:
        ValueError: there are more or fewer of them than groups.
    """
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(without_parameters(own))


def without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of one parameter group that are settings."""
    return {key: value for key, value in group.items() if key != "params"}
