"""The strategies of this package. Each is a module with one object, ``STRATEGY``.

They are found by listing the package's modules, so that a new strategy needs only a module and an option file of its
name in ``conf/activation_checkpoint/``.
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
"""The strategies by name."""


def options_by_key() -> dict[str, Option]:
    """The options of all strategies by key; a key that several strategies read means the same for each."""
    return {option.key: option for strategy in STRATEGIES.values() for option in strategy.options}


def owners_of(key: str) -> list[str]:
    """Names of the strategies that read a key."""
    return [name for name, strategy in STRATEGIES.items() if any(option.key == key for option in strategy.options)]
