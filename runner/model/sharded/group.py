"""The ranks that divide one layer's weights among them, and what they exchange while the layer runs.

The operators of :mod:`runner.model.sharded.operators` name their group by a string, because an exported or recorded
operator can hold no object. A name stands for a :class:`ShardGroup`, which is made with the model, before there are
ranks to talk to: profiles run it alone, on shapes. The strategy gives it an exchange when the ranks have met.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Exchange", "ShardGroup", "draws_apart", "exchange_kind", "group_of"]

OPERATORS = "runner_shards"
"""The namespace of the operators of :mod:`runner.model.sharded.operators`."""

_EXCHANGES = ("all_reduce", "all_reduce_max", "all_gather", "reduce_scatter")
_ODD = 0x9E3779B97F4A7C15  # 2 to the 64th over the golden ratio: seeds of neighbours have little in common
_numbers = count()
_groups: weakref.WeakValueDictionary[str, ShardGroup] = weakref.WeakValueDictionary()


class Exchange(Protocol):
    """What the ranks of a group do together. Every rank calls the same methods in the same order.

    No method changes its argument, and each returns a contiguous tensor of its own.
    """

    def all_reduce(self, value: Tensor) -> Tensor:
        """The sum of all ranks' tensors, the same bits on every rank."""
        ...

    def all_reduce_max(self, value: Tensor) -> Tensor:
        """The largest of all ranks' elements."""
        ...

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        """All ranks' tensors, one behind the other along ``dim``, in the order of the ranks."""
        ...

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        """This rank's part, along ``dim``, of the sum of all ranks' tensors."""
        ...


class _Alone:
    """Stands for the exchange where only shapes count: every other rank has what this one has."""

    def __init__(self, degree: int) -> None:
        self._degree = degree

    def all_reduce(self, value: Tensor) -> Tensor:
        return value.clone(memory_format=torch.contiguous_format)

    all_reduce_max = all_reduce

    def all_gather(self, value: Tensor, dim: int) -> Tensor:
        return torch.cat([value] * self._degree, dim)

    def reduce_scatter(self, value: Tensor, dim: int) -> Tensor:
        return value.narrow(dim, 0, value.shape[dim] // self._degree).clone(memory_format=torch.contiguous_format)


class ShardGroup:
    """The place of a rank among those that share each layer's weights.

    Args:
        degree: number of these ranks.
        index: the number of this one, from 0.
        shares_entries: whether layers that read the same tensor share what the ranks exchange for it.

    Attributes:
        name: names the group in operators; only this process knows it.
        exchange: what the ranks do together.
        is_apart: whether the ranks draw random numbers of their own at present.
        is_slicing: whether each of them computes a part of the samples at present.
    """

    def __init__(self, degree: int, index: int, *, shares_entries: bool = True) -> None:
        self.degree, self.index = degree, index
        self.name = f"shards{next(_numbers)}"
        self.exchange: Exchange = _Alone(degree)
        self.is_apart = False
        self.is_slicing = False
        self._shares_entries = shares_entries
        self._random: tuple[int, torch.device, Tensor] | None = None  # when the layers that are divided began
        self._entered: dict[int, _Entry] = {}
        self._sliced: dict[int, _Entry] = {}
        _groups[self.name] = self

    def own(self, value: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor that all ranks have, along ``dim``; a view."""
        size = self.part_of(value.shape[dim])
        return value.narrow(dim, self.index * size, size)

    def part_of(self, size: int) -> int:
        """The size of each rank's part.

        Raises:
            ValueError: the parts would differ.
        """
        if size % self.degree:
            raise ValueError(f"a dimension of {size} cannot be divided among {self.degree} ranks")
        return size // self.degree

    def known(self, value: Tensor) -> Tensor | None:
        """What :meth:`remember` was told of this very tensor, if nothing has been computed since that could differ."""
        entry = self._entered.get(id(value))
        return entry.made if entry is not None and entry.value() is value and entry.moment == _moment(value) else None

    def remember(self, value: Tensor, made: Tensor) -> None:
        """Note how a tensor enters the layers that read it, so that all of them share one entry, and one sum back.

        The note goes with the tensor: it keeps neither the tensor nor, once that is gone, the entry.
        """
        if self._shares_entries:
            self._note(self._entered, value, made)

    def remember_part(self, whole: Tensor, part: Tensor) -> None:
        """Note of which samples of this rank, beside those of others, a tensor was made; see :meth:`remember`."""
        self._note(self._sliced, whole, part)

    def part_behind(self, value: Tensor) -> Tensor | None:
        """This rank's samples of a tensor that was made of all ranks', or of a view of it with as many samples."""
        whole = value if value._base is None else value._base
        entry = self._sliced.get(id(whole))
        if entry is None or entry.value() is not whole or entry.moment != _moment(whole):
            return None
        same = value.numel() == whole.numel() and len(value) == len(whole) and value.is_contiguous()
        return entry.made.reshape(len(entry.made), *value.shape[1:]) if same else None

    def _note(self, entries: dict[int, _Entry], value: Tensor, made: Tensor) -> None:
        if value.is_inference():  # which has no count of its changes
            return
        key = id(value)

        def gone(reference: weakref.ref[Tensor]) -> None:
            if key in entries and entries[key].value is reference:
                del entries[key]

        entries[key] = _Entry(weakref.ref(value, gone), _moment(value), made)

    def forget(self) -> None:
        """Drop the notes of tensors that no operator has made: the next forward may find other numbers in them."""
        for key in [key for key, entry in self._entered.items() if (value := entry.value()) is None or value.is_leaf]:
            self._entered.pop(key, None)

    def draw_apart(self, device: torch.device) -> None:
        """Let this rank draw random numbers of its own until :meth:`draw_together`, as it computes its own part."""
        self.is_apart = True
        task = torch._C._current_graph_task_id()
        is_under_way = self._random is not None and self._random[0] == task  # else a second forward has stopped early
        if not is_under_way and not isinstance(self.exchange, _Alone):
            self._random = task, device, _random_state(device)
            drawn = torch.randint(1 << 62, (), device=device)
            _generator(device).manual_seed((int(drawn) + self.index * _ODD) % (1 << 63))

    def draw_together(self) -> None:
        """Go on with random numbers as if none had been drawn since :meth:`draw_apart`, the same on all ranks."""
        self.is_apart = False
        if self._random is not None:
            (_, device, state), self._random = self._random, None
            _set_random_state(device, state)


def exchange_kind(operator: Any) -> str | None:
    """What ranks exchange in an operator, as a dispatch mode is given it; None if it is none of these."""
    if getattr(operator, "namespace", "") != OPERATORS:
        return None
    name = str(operator.overloadpacket.__name__)
    return name if name in _EXCHANGES else None


def draws_apart() -> bool:
    """Whether a random number that is drawn now is one of this rank's own."""
    return any(group.is_apart for group in _groups.values())


def group_of(name: str) -> ShardGroup:
    """The group of this name.

    Raises:
        KeyError: no model holds it any more.
    """
    return _groups[name]


class _Entry(NamedTuple):
    value: weakref.ref[Tensor]
    moment: tuple[int, bool, bool, int]
    made: Tensor


def _moment(value: Tensor) -> tuple[int, bool, bool, int]:
    """What must not have changed, for one entry of a tensor to stand for two."""
    version = -1 if value.is_inference() else value._version
    return version, value.requires_grad, torch.is_grad_enabled(), torch._C._current_graph_task_id()


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _random_state(device: torch.device) -> Tensor:
    return _generator(device).get_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    _generator(device).set_state(state)
