"""Tells a LightningModule's own methods from those that it has of Lightning, without importing Lightning."""

from __future__ import annotations

from typing import Any

__all__ = ["brings", "is_lightnings"]

_PACKAGES = ("lightning", "pytorch_lightning")


def brings(module: Any, name: str) -> bool:
    """Whether the user's class defines a method itself."""
    owner = next((base for base in type(module).__mro__ if name in vars(base)), None)
    return owner is not None and not is_lightnings(owner)


def is_lightnings(base: type) -> bool:
    """Whether a class is of one of the packages' own."""
    return base.__module__.partition(".")[0] in _PACKAGES
