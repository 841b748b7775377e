"""Kinds of values that a checkpoint holds as plain ones, and gives back as what they were.

No name from a file is imported: a file says which of these kinds a value is, and nothing else.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import pathlib
import random
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf

__all__ = ["KINDS", "Kind", "kind_of"]


@dataclass(frozen=True)
class Kind:
    """How values of some types are written and read.

    Args:
        types: a value is of this kind if its type is one of these; of a subclass only where ``subclasses``.
        plain: the value in simpler parts, which may be of other kinds; None if this value cannot be written.
        back: the inverse.
        is_native: whether ``torch.load`` reads it without this, if its parts are plain.
    """

    types: tuple[type[Any], ...]
    plain: Callable[[Any], Any]
    back: Callable[[Any], Any]
    subclasses: bool = False
    is_native: bool = False


def _of_config(value: Any) -> Any:
    # A part of a larger configuration is resolved: what its interpolations point to is not in the file.
    is_part = value._get_parent() is not None
    return OmegaConf.to_container(value, resolve=is_part, enum_to_str=True)


def _of_scalar(value: np.generic) -> Any:
    return [value.dtype.str, value.item()] if value.dtype.kind in "biufcU" and value.dtype.itemsize <= 16 else None


def _to_scalar(parts: Any) -> Any:
    return np.dtype(parts[0]).type(parts[1])


def _of_array(value: Any) -> Any:
    native = np.ascontiguousarray(value).reshape(value.shape)
    if native.dtype.kind == "c":
        return [native.dtype.str, np.array(native.real), np.array(native.imag)]
    if native.dtype.kind in "biuf" and native.dtype.itemsize <= 16 and native.dtype != np.longdouble:
        try:
            return torch.from_numpy(native.astype(native.dtype.newbyteorder("="), copy=True))
        except TypeError:
            return None
    return [native.dtype.str, value.tolist()] if native.dtype.kind in "U" else None


def _to_array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone().numpy()
    made = np.array(value[1], dtype=value[0])
    if made.dtype.kind == "c":
        made.imag = value[2]
    return made


_BIT_GENERATORS = {"PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"}


def _of_numpy_generator(value: np.random.Generator) -> Any:
    state: Any = value.bit_generator.state
    return state if state["bit_generator"] in _BIT_GENERATORS else None


def _to_numpy_generator(state: Any) -> Any:
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise ValueError(f"there is no bit generator {state['bit_generator']}")
    source = getattr(np.random, state["bit_generator"])()
    source.state = state
    return np.random.Generator(source)


def _to_numpy_state(state: Any) -> Any:
    made = np.random.RandomState()
    made.set_state(state)
    return made


def _to_random(state: Any) -> Any:
    made = random.Random()
    made.setstate(state)
    return made


def _to_generator(parts: Any) -> Any:
    made = torch.Generator(device=parts[0])
    made.set_state(parts[1])
    return made


_FACTORIES: dict[str, Any] = {one.__name__: one for one in (int, float, str, bool, list, dict, set, tuple)}


def _of_default(value: Any) -> Any:
    factory = value.default_factory
    if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
        return [factory.__name__ if factory is not None else None, dict(value)]
    return None


def _to_default(parts: Any) -> Any:
    return collections.defaultdict(_FACTORIES[parts[0]] if parts[0] is not None else None, parts[1])


def _in_order(value: Any) -> list[Any]:
    return sorted(value, key=repr)  # of a set, so that equal states are equal files


def _dtype(name: str) -> Any:
    found = getattr(torch, name.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


KINDS: dict[str, Kind] = {
    "config": Kind((Container,), _of_config, OmegaConf.create, subclasses=True),
    "path": Kind((pathlib.PurePath,), str, pathlib.Path, subclasses=True),
    "numpy_scalar": Kind((np.generic,), _of_scalar, _to_scalar, subclasses=True),
    "numpy_array": Kind((np.ndarray,), _of_array, _to_array),
    "numpy_dtype": Kind((np.dtype,), lambda value: value.str, np.dtype, subclasses=True),
    "numpy_generator": Kind((np.random.Generator,), _of_numpy_generator, _to_numpy_generator),
    "numpy_random_state": Kind((np.random.RandomState,), lambda value: value.get_state(legacy=False), _to_numpy_state),
    "random": Kind((random.Random,), lambda value: value.getstate(), _to_random),
    "generator": Kind((torch.Generator,), lambda value: [str(value.device), value.get_state()], _to_generator),
    "namespace": Kind((argparse.Namespace,), lambda value: dict(vars(value)), lambda own: argparse.Namespace(**own)),
    "simple_namespace": Kind(
        (types.SimpleNamespace,), lambda value: dict(vars(value)), lambda own: types.SimpleNamespace(**own)
    ),
    "set": Kind((set,), _in_order, set, is_native=True),
    "frozenset": Kind((frozenset,), _in_order, frozenset),
    "ordered_dict": Kind((collections.OrderedDict,), dict, collections.OrderedDict, is_native=True),
    "counter": Kind((collections.Counter,), dict, collections.Counter, is_native=True),
    "defaultdict": Kind((collections.defaultdict,), _of_default, _to_default),
    "deque": Kind(
        (collections.deque,), lambda value: [value.maxlen, list(value)], lambda p: collections.deque(p[1], p[0])
    ),
    "bytes": Kind((bytes,), lambda value: value.decode("latin-1"), lambda text: text.encode("latin-1"), is_native=True),
    "bytearray": Kind(
        (bytearray,), lambda value: value.decode("latin-1"), lambda text: bytearray(text, "latin-1"), is_native=True
    ),
    "complex": Kind((complex,), lambda value: [value.real, value.imag], lambda p: complex(*p), is_native=True),
    "dtype": Kind((torch.dtype,), str, _dtype, is_native=True),
    "device": Kind((torch.device,), str, torch.device, is_native=True),
    "size": Kind((torch.Size,), list, torch.Size, is_native=True),
    "slice": Kind((slice,), lambda value: [value.start, value.stop, value.step], lambda p: slice(*p)),
    "range": Kind((range,), lambda value: [value.start, value.stop, value.step], lambda p: range(*p)),
    "datetime": Kind((datetime.datetime,), lambda value: value.isoformat(), datetime.datetime.fromisoformat),
    "date": Kind((datetime.date,), lambda value: value.isoformat(), datetime.date.fromisoformat),
    "timedelta": Kind(
        (datetime.timedelta,),
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda p: datetime.timedelta(*p),
    ),
    "decimal": Kind((decimal.Decimal,), str, decimal.Decimal),
    "fraction": Kind((fractions.Fraction,), str, fractions.Fraction),
    "uuid": Kind((uuid.UUID,), str, uuid.UUID),
}


def kind_of(value: Any) -> str | None:
    """The name of a value's kind, or None if it has none."""
    own = type(value)
    for name, kind in KINDS.items():
        if own in kind.types or (kind.subclasses and isinstance(value, kind.types)):
            return name
    return None
