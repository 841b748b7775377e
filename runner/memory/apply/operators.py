"""Notes the operators of a forward, so that any tensor that they made can be made again.

A value is the content of one storage after one operator. An operator that changes a tensor in place makes a new value
of the same storage. Values that nothing needs any more, and operators that made only such values, are forgotten by
Python's own counting of references: an operator holds its inputs, and a value the operator that made it.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from runner.model.dense_parts import dense_parts

__all__ = ["InPlaceError", "Operator", "Place", "Recorder", "Value"]

_FLOPS_PER_BYTE = 16.0  # so many FLOPs take as long as to read or write one byte

_numbers = itertools.count()


@dataclass(eq=False)
class Value:
    """The content of one storage after one operator.

    Args:
        operator: what made it.
        output: its place among the storages that the operator made; None if the operator changed one in place.
        before: the value that was changed; None if it is a storage of its own.
        num_bytes: its size.
        dtype: the type of numbers as which it was made.
        tensor: a tensor with its storage as long as it is kept.
        slots: how many saved tensors lie in it.
        last_use: the time of its last use, by the clock of whoever keeps it.
    """

    operator: Operator
    output: int | None
    before: Value | None
    num_bytes: int
    dtype: torch.dtype
    tensor: Tensor | None = None
    slots: int = 0
    last_use: float = 0.0
    _users: list[weakref.ref[Operator]] = field(default_factory=list)

    @property
    def users(self) -> list[Operator]:
        """The operators that need it and are themselves still needed, in the order in which they ran."""
        return [operator for each in self._users if (operator := each()) is not None]

    def note_user(self, operator: Operator) -> None:
        """Note an operator that needs it."""
        self._users.append(weakref.ref(operator))


@dataclass(frozen=True, slots=True)
class Place:
    """Says where a tensor lies in a value."""

    value: Value
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Value, tensor: Tensor) -> Place:
        return cls(value, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def within(self, whole: Tensor) -> Tensor:
        """The tensor; ``whole`` has the value's storage."""
        if whole.dtype == self.dtype:
            return whole.as_strided(self.size, self.stride, self.offset)
        made = torch.empty(0, dtype=self.dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A tensor that an operator may change without saying so, like a batch norm its running averages."""

    tensor: Tensor


@dataclass(eq=False)
class Operator:
    """One operator that ran, and what it needs to run again.

    Args:
        function: the operator.
        arguments: positional and keyword arguments; tensors of values are places.
        random: the states of the CPU's and the device's generator before it ran, if it draws from them.
        cost: an estimate of its seconds, in bytes that are read or written.
        num_bytes: what it allocates when it runs again: the storages that it made, and copies of buffers.
        number: counts operators in the order in which they ran.
    """

    function: Any
    arguments: tuple[Any, Any]
    random: tuple[Tensor, Tensor | None] | None
    cost: float
    num_bytes: int
    number: int = field(default_factory=lambda: next(_numbers))
    _made: list[weakref.ref[Value]] = field(default_factory=list)

    @property
    def made(self) -> list[Value]:
        """The values that it made, or changed in place, and that are still needed."""
        return [value for each in self._made if (value := each()) is not None]

    def note_made(self, value: Value) -> None:
        """Note a value that it has made or changed."""
        self._made.append(weakref.ref(value))

    @cached_property
    def inputs(self) -> list[Value]:
        """The values from which it is computed, with those that it changes."""
        places = (leaf for leaf in _leaves(self.arguments) if isinstance(leaf, Place))
        return list(dict.fromkeys(place.value for place in places))

    def run(self, wholes: dict[Value, Tensor]) -> list[Tensor]:
        """Run it again; return a tensor for each storage that it made.

        Args:
            wholes: for each of its inputs a tensor with its storage; those that it changes are changed.
        """

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                return leaf.within(wholes[leaf.value])
            return leaf.tensor.clone() if isinstance(leaf, _Buffer) else leaf

        args, kwargs = _mapped(given, self.arguments)
        with torch.no_grad(), _drawing_from(self.random):
            result = self.function(*args, **kwargs)
        return _new_storages(result, _strided((args, kwargs)))


class InPlaceError(RuntimeError):
    """An operator changes what a backward needs as it was, so that it could not be made again."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """Notes the operators of one forward, and which value each storage holds.

    Args:
        buffers: tensors of which copies are given to an operator that runs again.
        made: is called with each value that an operator has made.
    """

    def __init__(self, buffers: Iterable[Tensor], made: Callable[[Value], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made
        self._buffers = weakref.WeakSet(buffer.untyped_storage() for buffer in dense_parts(buffers))
        self._values: weakref.WeakKeyDictionary[Any, Value] = weakref.WeakKeyDictionary()

    def place_of(self, tensor: Tensor) -> Place | None:
        """The tensor's place; None if it was not made in this forward."""
        value = self._values.get(tensor.untyped_storage()) if tensor.layout is torch.strided else None
        return None if value is None else Place.of(value, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _makes_views(func):
            return func(*args, **kwargs)
        given = _strided((args, kwargs))
        changed = _changed(func, args, kwargs)
        self._refuse(func, changed, kwargs)
        random = _states(given) if torch.Tag.nondeterministic_seeded in func.tags else None
        arguments = _mapped(self._held, (args, kwargs))
        result = func(*args, **kwargs)
        made = _new_storages(result, given)
        befores = [value for each in changed if (value := self._values.get(each.untyped_storage())) is not None]
        if made or befores:
            copies = [leaf.tensor for leaf in _leaves(arguments) if isinstance(leaf, _Buffer)] if self._buffers else []
            num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in (*made, *copies))
            cost = _cost(func, args, kwargs, [*given, *_strided(result)], result)
            operator = Operator(func, arguments, random, cost, num_bytes)
            self._note(operator, made, befores, changed)
        return result

    def _note(self, operator: Operator, made: list[Tensor], befores: list[Value], changed: list[Tensor]) -> None:
        for each in operator.inputs:
            each.note_user(operator)
        values = []
        for at, tensor in enumerate(made):
            storage = tensor.untyped_storage()
            self._values[storage] = value = Value(operator, at, None, storage.nbytes(), tensor.dtype)
            values.append(value)
        storages = {self._values.get(tensor.untyped_storage()): tensor.untyped_storage() for tensor in changed}
        for before in befores:
            value = Value(operator, None, before, before.num_bytes, before.dtype)
            self._values[storages[before]] = value
            values.append(value)
        for value in values:
            operator.note_made(value)
        for value in values:
            self._made(value)

    def _held(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = self.place_of(leaf)
        if place is not None:
            return place
        is_buffer = leaf.layout is torch.strided and leaf.untyped_storage() in self._buffers
        return _Buffer(leaf) if is_buffer else leaf.detach()

    def _refuse(self, func: Any, changed: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Raise an error for what could not be made again with the same bits."""
        if any((value := self._values.get(each.untyped_storage())) is not None and value.slots for each in changed):
            raise InPlaceError(f"{func} changes a tensor in place that a backward needs as it was")
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{func} draws from a generator of its own, whose numbers could not be drawn again")


def _leaves(nest: Any) -> Iterator[Any]:
    """The leaves of what an operator takes or returns. Torch's general walk takes several times as long."""
    if isinstance(nest, (tuple, list)):
        for each in nest:
            yield from _leaves(each)
    elif isinstance(nest, dict):
        yield from _leaves(list(nest.values()))
    else:
        yield nest


def _mapped(function: Callable[[Any], Any], nest: Any) -> Any:
    """The same nest with the result of a function in the place of each leaf."""
    if isinstance(nest, (tuple, list)):
        return type(nest)([_mapped(function, each) for each in nest])
    if isinstance(nest, dict):
        return {key: _mapped(function, each) for key, each in nest.items()}
    return function(nest)


def _strided(nest: Any) -> list[Tensor]:
    return [leaf for leaf in _leaves(nest) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]


def _new_storages(result: Any, given: list[Tensor]) -> list[Tensor]:
    """One tensor for each storage of a result that is none of the given ones."""
    known = {tensor.untyped_storage()._cdata for tensor in given}
    found: dict[int, Tensor] = {}
    for tensor in _strided(result):
        if (address := tensor.untyped_storage()._cdata) not in known:
            found.setdefault(address, tensor)
    return list(found.values())


def _changed(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator says it changes in place."""
    given = (args[at] if at < len(args) else kwargs.get(name) for at, name in _written(func))
    return [tensor for each in given for tensor in _strided(each)]


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operator changes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


@cache
def _makes_views(func: Any) -> bool:
    """Whether all that an operator returns lies, unchanged, in what it was given, as most operators of a forward do."""
    views = [each.alias_info for each in func._schema.returns]
    if not func.is_view or any(each is None or each.is_write for each in views):
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # may copy


def _cost(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], result: Any) -> float:
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    count = flop_registry.get(getattr(func, "_overloadpacket", None))
    return moved + (float(count(*args, **kwargs, out_val=result)) / _FLOPS_PER_BYTE if count is not None else 0.0)


def _states(given: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    on_cuda = next((tensor.device for tensor in given if tensor.is_cuda), None)
    return torch.get_rng_state(), None if on_cuda is None else torch.cuda.get_rng_state(on_cuda)


@contextmanager
def _drawing_from(states: tuple[Tensor, Tensor | None] | None) -> Iterator[None]:
    """Let generators begin with given states; they are as they were before when the context ends."""
    if states is None:
        yield
        return
    own = torch.get_rng_state(), None if states[1] is None else torch.cuda.get_rng_state()
    _set_generators(*states)
    try:
        yield
    finally:
        _set_generators(*own)


def _set_generators(of_cpu: Tensor, of_device: Tensor | None) -> None:
    torch.set_rng_state(of_cpu)
    if of_device is not None:
        torch.cuda.set_rng_state(of_device)
