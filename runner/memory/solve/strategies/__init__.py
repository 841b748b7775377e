"""The strategies that are shipped: each is a module of this package with one object, ``STRATEGY``.

They are found by looking through the package, so that a module and an option file ``conf/activation_checkpoint/`` of
its name are all that a new one needs.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from runner.memory.solve.strategy import Option, Strategy

__all__ = ["STRATEGIES", "options_by_key", "owners_of"]


def _found() -> dict[str, Strategy]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.STRATEGY.name: module.STRATEGY for module in modules}


STRATEGIES: Mapping[str, Strategy] = _found()
"""By name."""


def options_by_key() -> dict[str, Option]:
    """Every key that a strategy reads; strategies that share one mean the same by it."""
    return {option.key: option for strategy in STRATEGIES.values() for option in strategy.options}


def owners_of(key: str) -> list[str]:
    """Names of the strategies that read a key."""
    return [name for name, strategy in STRATEGIES.items() if any(option.key == key for option in strategy.options)]
