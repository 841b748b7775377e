"""The offload strategies of this package. Each is a module with one object, ``OFFLOAD``.

They are found by listing the package's modules, so that a new strategy needs only a module and an option file of its
name in ``conf/offload/``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from runner.memory.solve.offload import Offload

__all__ = ["OFFLOADS"]


def _found() -> dict[str, Offload]:
    modules = (import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return {module.OFFLOAD.name: module.OFFLOAD for module in modules}


OFFLOADS: Mapping[str, Offload] = _found()
"""The strategies by name."""
