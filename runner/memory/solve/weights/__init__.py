"""The strategies that keep weights in the host's memory. Each is a module with one object, ``WEIGHTS``.

They are found by listing the package's modules, so that a new strategy needs only a module and an option file of its
name, ``conf/offload/weights_NAME.yaml``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from runner.memory.solve.weight_strategy import WeightStrategy

__all__ = ["WEIGHT_STRATEGIES"]


def _found() -> dict[str, WeightStrategy]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.WEIGHTS.name: module.WEIGHTS for module in modules}


WEIGHT_STRATEGIES: Mapping[str, WeightStrategy] = _found()
"""The strategies by name."""
