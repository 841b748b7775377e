"""The strategies that keep weights in the host's memory. Each is a module with one object, ``WEIGHTS``.

They are found by listing the package's modules, so that a new strategy needs only a module and an option file of its
name, ``conf/offload/weights_NAME.yaml``. Strategies of activations that can choose among weights, too, are among them
by their own names; a request asks for them by ``offload.scope=weights`` or ``all``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from runner.memory.solve.offloads import OFFLOADS
from runner.memory.solve.weight_strategy import WeightStrategy

__all__ = ["WEIGHT_STRATEGIES"]


def _found() -> dict[str, WeightStrategy]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.WEIGHTS.name: module.WEIGHTS for module in modules}


def _of_activations() -> dict[str, WeightStrategy]:
    return {
        name: WeightStrategy(name, offload.choose_weights, offload.source, offload.about, reads_budget=True)
        for name, offload in OFFLOADS.items()
        if offload.choose_weights is not None
    }


WEIGHT_STRATEGIES: Mapping[str, WeightStrategy] = {**_found(), **_of_activations()}
"""The strategies by name."""
