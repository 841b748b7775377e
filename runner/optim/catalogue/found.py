"""Finds kinds by listing a package, so that a new kind needs only a file in it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Protocol, TypeVar

__all__ = ["Named", "find_kinds"]


class Named(Protocol):
    """An object with a name, as every kind is."""

    @property
    def name(self) -> str: ...


Kind = TypeVar("Kind", bound=Named)


def find_kinds(package: ModuleType, kind: type[Kind]) -> Mapping[str, Kind]:
    """Every object of type ``kind`` at the top level of a module of ``package``, by name.

    Raises:
        ValueError: two have one name.
    """
    found: dict[str, Kind] = {}
    for file in sorted(pkgutil.iter_modules(package.__path__), key=lambda each: each.name):
        module = importlib.import_module(f"{package.__name__}.{file.name}")
        for each in vars(module).values():
            if isinstance(each, kind) and found.setdefault(each.name, each) is not each:
                raise ValueError(f"{module.__name__}: another file has a {kind.__name__} named {each.name}")
    return MappingProxyType(found)
