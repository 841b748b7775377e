"""Finds what a user's modules hold, and notes it in place.

What is shared stays shared when it is written back. Objects of torch, Lightning and the runner are left alone, except
modules, tensors and generators.
"""

from __future__ import annotations

import collections
import itertools
import pickle
import random
import sys
import types
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import IOBase
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from runner.model.dense_parts import SPARSE_LAYOUTS
from runner.reads import is_users_file

__all__ = ["Part", "Walk"]

_FOREIGN = {
    "torch",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "runner",
    "deepspeed",
    "logging",
    "threading",
}
_OF_DEEPSPEED = "_external_params"
"""Where DeepSpeed notes in the first forward which weights of others a module reads; the next ones count on it."""
_FIXED = (int, float, complex, str, bytes, np.generic, type(None), PurePath, torch.dtype, torch.device, torch.Size)


class Part:
    """Something that can be read and written as a list of its contents.

    Args:
        name: what it is called.
        read: returns the contents.
        write: makes these the contents.
        is_named: whether the contents are names and values in turn.
    """

    def __init__(
        self, name: str, read: Callable[[], list[Any]], write: Callable[[list[Any]], None], *, is_named: bool = False
    ) -> None:
        self.name, self.is_named, self._read, self._write = name, is_named, read, write
        self._before = read()

    def has_changed(self) -> bool:
        """Whether the contents are other ones."""
        return not _are_same(self._read(), self._before)

    def gone(self) -> list[Any]:
        """What has been among the contents."""
        left = {id(each) for each in self._read()}
        return [each for each in self._before if id(each) not in left]

    def changed_name(self) -> str:
        """The name with that of the first content that has changed, where contents have names."""
        now = self._read()
        pairs = dict(zip(now[::2], now[1::2], strict=False)) if self.is_named else {}
        for key, value in zip(self._before[::2], self._before[1::2], strict=False) if self.is_named else ():
            if key not in pairs or not _is_same(pairs[key], value):
                return ".".join(part for part in (self.name, str(key)) if part)
        return self.name

    def put_back(self, instead: dict[int, Any]) -> None:
        """Make the contents those that were, but some by others of this dict."""
        wanted = [instead.get(id(each), each) for each in self._before]
        if not _are_same(self._read(), wanted):
            self._write(wanted)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(_is_same, some, others))


def _is_same(one: Any, other: Any) -> bool:
    plain = isinstance(one, _FIXED) and type(one) is type(other)
    return one is other or bool(plain and not isinstance(one, np.generic) and one == other)


_OF_PROCESS: tuple[Any, ...] = (torch.default_generator, random._inst, np.random.mtrand._rand)
"""The generators of the process, which are seeded anew before each layer; ``random_split`` has one as its default."""


class Walk:
    """All that can be reached from some objects.

    Args:
        objects: pairs of a name and a module, function or other object.
        most_bytes: the most bytes of arrays that are copied.

    Attributes:
        parts: the contents of containers, attributes, generators and arrays.
        tensors: the tensors that have a memory, with their names, by keys.
        instead: copies of objects that cannot be changed back, by the objects' numbers.
        traces: what can only be seen to have changed: its name, itself, and the objects that tell it.
    """

    def __init__(self, objects: Iterable[tuple[str, Any]], most_bytes: int) -> None:
        self.parts: list[Part] = []
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.instead: dict[int, Any] = {}
        self.traces: list[tuple[str, Any, list[Any]]] = []
        self._generators: list[Part] = []
        self._left = most_bytes
        self._seen: dict[int, Any] = {}  # the objects stay alive, and so do their numbers
        self._open = [*objects][::-1]
        while self._open:
            self._keep(*self._open.pop())

    def drawn(self) -> list[str]:
        """The names of Python's and NumPy's generators that have gone on."""
        return [part.name for part in self._generators if part.has_changed()]

    def lost(self) -> list[str]:
        """The names of what has gone on and cannot be put back."""
        return [name for name, value, before in self.traces if not _are_same(_trace_of(value), before)]

    def _keep(self, name: str, value: Any) -> None:
        if isinstance(value, _FIXED) or id(value) in self._seen or any(value is each for each in _OF_PROCESS):
            return
        self._seen[id(value)] = value
        for kind, keep in _KEEPERS:
            if isinstance(value, kind):
                keep(self, name, value)
                break
        if isinstance(value, type | types.ModuleType | np.ndarray) or _is_foreign(value):
            return
        if isinstance(own := getattr(value, "__dict__", None), dict):
            self._keep_namespace(name, own)
        for slot in {slot for each in type(value).__mro__ for slot in _slots(each)}:
            self._keep_attribute(f"{name}.{slot}", value, slot)
        self._open.append((type(value).__name__, type(value)))

    def _part(
        self, name: str, read: Callable[[], list[Any]], write: Callable[[list[Any]], None], *, is_named: bool = False
    ) -> None:
        self.parts.append(Part(name, read, write, is_named=is_named))

    def _generator(self, name: str, read: Callable[[], list[Any]], write: Callable[[list[Any]], None]) -> None:
        self._part(name, read, write)
        self._generators.append(self.parts[-1])

    def _keep_tensor(self, name: str, value: Tensor) -> None:
        if value.layout is torch.strided:
            self.tensors[id(value)] = name, value
        elif value.layout in SPARSE_LAYOUTS:
            before = value.detach().clone()
            self._part(name, lambda: [value._version], lambda _: _write_sparse(value, before))
        if value.is_leaf and (value.is_floating_point() or value.is_complex()):
            self._part(name, lambda: [value.requires_grad], lambda needed: _require_gradient(value, *needed))

    def _keep_namespace(self, name: str, value: dict[str, Any]) -> None:
        """Keep the variables of an object or a module."""

        def read() -> list[Any]:
            kept = ((k, each) for k, each in value.items() if not str(k).startswith("__") and k != _OF_DEEPSPEED)
            return [part for pair in kept for part in pair]

        def write(contents: list[Any]) -> None:
            for key in set(read()[::2]) - set(contents[::2]):
                del value[key]
            value.update(zip(contents[::2], contents[1::2], strict=True))

        self._part(name, read, write, is_named=True)
        contents = read()
        pairs = zip(contents[::2], contents[1::2], strict=True)
        self._open += [(".".join(part for part in (name, str(key)) if part), each) for key, each in pairs]

    def _keep_dict(self, name: str, value: Any) -> None:
        def write(contents: list[Any]) -> None:
            value.clear()
            value.update(zip(contents[::2], contents[1::2], strict=True))

        self._part(name, lambda: [part for pair in value.items() for part in pair], write)
        self._open += [(".".join(part for part in (name, str(key)) if part), each) for key, each in value.items()]

    def _keep_sequence(self, name: str, value: Any) -> None:
        def write(contents: list[Any]) -> None:
            del value[:]
            value.extend(contents)

        self._part(name, lambda: list(value), write)
        self._keep_inside(name, value)

    def _keep_set(self, name: str, value: Any) -> None:
        def write(contents: list[Any]) -> None:
            value.clear()
            (value.extend if isinstance(value, collections.deque) else value.update)(contents)

        self._part(name, lambda: list(value), write)
        self._keep_inside(name, value)

    def _keep_inside(self, name: str, values: Iterable[Any]) -> None:
        self._open += [(f"{name}[{place}]", each) for place, each in enumerate(values)]

    def _keep_array(self, name: str, value: np.ndarray[Any, Any]) -> None:
        if value.flags.writeable and value.nbytes <= self._left and not value.dtype.hasobject:
            self._left -= value.nbytes
            self._part(name, lambda: [value.tobytes()], lambda read: _write_array(value, *read))

    def _keep_random(self, name: str, value: random.Random) -> None:
        if isinstance(value, random.SystemRandom):
            return  # it has no state
        read = lambda: [pickle.dumps(value.getstate())]  # noqa: E731
        self._generator(name, read, lambda state: value.setstate(pickle.loads(*state)))

    def _keep_numpy_random(self, name: str, value: np.random.Generator) -> None:
        bits = value.bit_generator
        self._generator(
            name, lambda: [pickle.dumps(bits.state)], lambda read: setattr(bits, "state", pickle.loads(*read))
        )

    def _keep_numpy_state(self, name: str, value: np.random.RandomState) -> None:
        read = lambda: [pickle.dumps(value.get_state())]  # noqa: E731
        self._generator(name, read, lambda state: value.set_state(pickle.loads(*state)))

    def _keep_torch_random(self, name: str, value: torch.Generator) -> None:
        def read() -> list[Any]:
            with _disable_current_modes():  # a fake state would have no bytes
                return [value.get_state().numpy().tobytes()]

        self._part(name, read, lambda state: _set_generator(value, *state))

    def _keep_method(self, name: str, value: types.MethodType) -> None:
        self._open += [(name, value.__func__), (name, value.__self__)]

    def _keep_partial(self, name: str, value: partial[Any]) -> None:
        self._open += [(name, value.func), (name, value.args), (name, value.keywords)]

    def _keep_code(self, name: str, value: Any) -> None:
        self._open += [(name, getattr(value, part, None)) for part in ("__func__", "fget", "fset")]

    def _keep_function(self, name: str, value: types.FunctionType) -> None:
        for cell, variable in zip(value.__closure__ or (), value.__code__.co_freevars, strict=True):
            self._keep_attribute(f"{name}.{variable}", cell, "cell_contents")
        self._open += [(name, each) for each in (value.__defaults__, value.__kwdefaults__)]
        if is_users_file(value.__code__.co_filename) and id(value.__globals__) not in self._seen:
            self._seen[id(value.__globals__)] = value.__globals__
            self._keep_namespace(value.__module__, value.__globals__)

    def _keep_module(self, _: str, value: types.ModuleType) -> None:
        if is_users_file(getattr(value, "__file__", None) or "<") and id(vars(value)) not in self._seen:
            self._seen[id(vars(value))] = vars(value)
            self._keep_namespace(value.__name__, vars(value))

    def _keep_class(self, _: str, value: type) -> None:
        for each in value.__mro__:
            if is_users_file(getattr(sys.modules.get(each.__module__), "__file__", None) or "<"):
                self._keep_variables(each)

    def _keep_variables(self, value: type) -> None:
        for attribute, content in list(vars(value).items()):
            name = f"{value.__name__}.{attribute}"
            self._open.append((name, content))
            if not attribute.startswith("__"):
                read = partial(_variable, value, attribute)
                self._part(name, read, lambda contents, attribute=attribute: setattr(value, attribute, *contents))  # type: ignore[misc]

    def _keep_attribute(self, name: str, owner: Any, attribute: str) -> None:
        def read() -> list[Any]:
            try:
                return [getattr(owner, attribute)]
            except (AttributeError, ValueError):  # an empty slot, an empty cell
                return []

        def write(contents: list[Any]) -> None:
            if contents:
                setattr(owner, attribute, *contents)
            else:
                delattr(owner, attribute)

        self._part(name, read, write)
        self._open += [(name, each) for each in read()]

    def _keep_count(self, name: str, value: itertools.count[int]) -> None:
        begins = value.__reduce__()[1]
        self.instead[id(value)] = itertools.count(*begins)
        self._part(name, lambda: [repr(value)], lambda _: None)

    def _keep_trace(self, name: str, value: Any) -> None:
        self.traces.append((name, value, _trace_of(value)))


def _variable(owner: type, name: str) -> list[Any]:
    return [vars(owner).get(name)]


def _require_gradient(tensor: Tensor, needed: bool) -> None:
    tensor.requires_grad_(needed)


def _write_sparse(value: Tensor, before: Tensor) -> None:
    """Give a sparse tensor its values again; an operator in place gives it new memory."""
    with torch.no_grad():
        value.copy_(before)


def _write_array(value: np.ndarray[Any, Any], content: bytes) -> None:
    value[...] = np.frombuffer(content, value.dtype).reshape(value.shape)


def _set_generator(generator: torch.Generator, state: bytes) -> None:
    with _disable_current_modes():
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _trace_of(value: Any) -> list[Any]:
    """What tells that a generator or an open file has gone on."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return [] if frame is None else [frame.f_lasti, *itertools.chain(*frame.f_locals.items())]
    return [] if value.closed or not value.seekable() else [value.tell()]


def _slots(kind: type) -> Iterator[str]:
    named = vars(kind).get("__slots__", ())
    yield from (named,) if isinstance(named, str) else named


def _is_foreign(value: Any) -> bool:
    """Whether an object's attributes are left alone."""
    return type(value).__module__.partition(".")[0] in _FOREIGN and not isinstance(value, nn.Module)


_KEEPERS: tuple[tuple[Any, Callable[[Walk, str, Any], None]], ...] = (
    (Tensor, Walk._keep_tensor),
    (dict, Walk._keep_dict),
    (list | bytearray | array, Walk._keep_sequence),
    (set | collections.deque, Walk._keep_set),
    (tuple | frozenset, Walk._keep_inside),
    (np.ndarray, Walk._keep_array),
    (random.Random, Walk._keep_random),
    (np.random.Generator, Walk._keep_numpy_random),
    (np.random.RandomState, Walk._keep_numpy_state),
    (torch.Generator, Walk._keep_torch_random),
    (types.FunctionType, Walk._keep_function),
    (types.MethodType, Walk._keep_method),
    (staticmethod | classmethod | property, Walk._keep_code),
    (partial, Walk._keep_partial),
    (types.ModuleType, Walk._keep_module),
    (type, Walk._keep_class),
    (itertools.count, Walk._keep_count),
    (types.GeneratorType | IOBase, Walk._keep_trace),
)
