"""The strategies of this package. Each is a module with one object, ``STRATEGY``.

They are found by listing the package's modules, so that a new strategy needs only a module and an option file of its
name in ``conf/activation_checkpoint/``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from runner.memory.solve.strategy import Strategy
from runner.options import Option, owners_by_key

__all__ = ["OPTIONS", "STRATEGIES"]


def _found() -> dict[str, Strategy]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.STRATEGY.name: module.STRATEGY for module in modules}


STRATEGIES: Mapping[str, Strategy] = _found()
"""The strategies by name."""


OPTIONS: Mapping[str, Mapping[str, Option]] = owners_by_key({name: each.options for name, each in STRATEGIES.items()})
"""The keys that strategies read -> the option of each that does, by its name; a key means the same for all."""
