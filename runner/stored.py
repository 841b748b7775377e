"""Writes values as JSON and reads them again: trees of dataclasses, named tuples, enums, tuples, lists, dicts and sets.

The document names each class once with its fields, then gives every object as the number of its class and the values of
its fields in that order; an object that several others share is there once::

    {"kinds": [["runner.schedule.values:Program", "schedule", ...], ...],
     "objects": [[0, {"is": 3}, ...], ...], "value": {"is": 4}}

Tuples are JSON's arrays, and a function is its name. Only classes and functions of the runner are written or read, so
that a file imports nobody else's code.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

__all__ = ["read_value", "value_text"]

_OWN = "runner."
_PLAIN = (bool, int, float, str)
_GROUPS: dict[str, Callable[[list[Any]], Any]] = {"list": list, "set": set, "frozenset": frozenset, "dict": dict}


def value_text(value: Any) -> str:
    """The JSON document of a value; numbers have full precision.

    Raises:
        TypeError: a part of it is no such value.
    """
    writer = _Writer()
    top = writer.written(value)
    return json.dumps({"kinds": writer.kinds, "objects": writer.objects, "value": top}, separators=(",", ":")) + "\n"


def read_value(text: str) -> Any:
    """The value of a document of :func:`value_text`; fields that the document lacks have their defaults.

    Raises:
        ValueError: the text is no such document, or its classes are not as they were when it was written.
    """
    try:
        document = json.loads(text)
        reader = _Reader(document["kinds"])
        for kind, *values in document["objects"]:
            reader.objects.append(reader.made(kind, values))
        return reader.read(document["value"])
    except (KeyError, TypeError, IndexError, AttributeError, ImportError) as error:
        raise ValueError(f"not a value of this version: {type(error).__name__}: {error}") from error


class _Writer:
    def __init__(self) -> None:
        self.kinds: list[list[str]] = []
        self.objects: list[list[Any]] = []
        self._kinds: dict[type, int] = {}
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # what has a number must not give its identity to another object

    def written(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return {"enum": [self._kind(type(value), ()), value.name]}
        if value is None or isinstance(value, _PLAIN):
            return value
        if type(value) is tuple:
            return [self.written(each) for each in value]
        if type(value) in (list, set, frozenset):
            parts = value if isinstance(value, list) else sorted(value)
            return {type(value).__name__: [self.written(each) for each in parts]}
        if isinstance(value, FunctionType) and _is_named(value):
            return {"function": f"{value.__module__}:{value.__qualname__}"}
        if isinstance(value, Mapping):
            return {"dict": [[self.written(key), self.written(each)] for key, each in value.items()]}
        names = _fields(type(value))
        if names is not None:
            return {"is": self._number(value, names)}
        raise TypeError(f"a {type(value).__qualname__} cannot be written: {value!r:.80}")

    def _number(self, value: Any, names: Sequence[str]) -> int:
        if id(value) not in self._numbers:
            row = [self._kind(type(value), names), *(self.written(getattr(value, name)) for name in names)]
            self._numbers[id(value)] = len(self.objects)
            self._alive.append(value)
            self.objects.append(row)
        return self._numbers[id(value)]

    def _kind(self, kind: type, fields: Sequence[str]) -> int:
        if kind not in self._kinds:
            if not kind.__module__.startswith(_OWN):
                raise TypeError(f"a {kind.__module__}.{kind.__qualname__} cannot be written: it is not the runner's")
            self._kinds[kind] = len(self.kinds)
            self.kinds.append([f"{kind.__module__}:{kind.__qualname__}", *fields])
        return self._kinds[kind]


class _Reader:
    def __init__(self, kinds: list[list[str]]) -> None:
        self.objects: list[Any] = []
        self._kinds = [(_class(name), fields) for name, *fields in kinds]

    def made(self, kind: int, values: list[Any]) -> Any:
        made, names = self._kinds[kind]
        return made(**dict(zip(names, map(self.read, values), strict=True)))

    def read(self, written: Any) -> Any:
        if isinstance(written, list):
            return tuple(map(self.read, written))
        if not isinstance(written, dict):
            return written
        ((how, value),) = written.items()
        if how == "is":
            return self.objects[value]
        if how == "enum":
            return self._kinds[value[0]][0][value[1]]
        if how == "function":
            return _function(value)
        return _GROUPS[how](list(map(self.read, value)))


def _is_named(function: FunctionType) -> bool:
    """Whether a function is the runner's and is found by its name."""
    return function.__module__.startswith(_OWN) and "<" not in function.__qualname__


def _function(name: str) -> FunctionType:
    found = _found(name)
    if not isinstance(found, FunctionType) or not _is_named(found):
        raise ValueError(f"{name} is no function of the runner")
    return found


def _found(name: str) -> Any:
    module, _, qualified = name.partition(":")
    if not module.startswith(_OWN):
        raise ValueError(f"{name} is no class of the runner and no function")
    found: Any = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part)
    return found


def _class(name: str) -> Any:
    found = _found(name)
    if not isinstance(found, type) or (_fields(found) is None and not issubclass(found, enum.Enum)):
        raise ValueError(f"{name} is no class of values")
    return found


_KNOWN: dict[type, Sequence[str] | None] = {}


def _fields(kind: type) -> Sequence[str] | None:
    """The names of the arguments that make an object of a class; None if it is no class of values."""
    if kind not in _KNOWN:
        if dataclasses.is_dataclass(kind):
            _KNOWN[kind] = [field.name for field in dataclasses.fields(kind) if field.init]
        else:
            _KNOWN[kind] = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return _KNOWN[kind]
