"""Measures the peak of a layer's second forward that is given the outputs of chosen operators.

One ordinary forward tells it for every preset: such a forward has at each moment what the ordinary one has, and those
of the given outputs that the ordinary one has not made yet.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.memory.solve.save_ops import OPERATORS, SaveChoice
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.profiling.saved_scan import operator_name

__all__ = ["OperatorPeaks"]

_NAMES = frozenset[str]().union(*(names for names, _ in OPERATORS.values()))


class OperatorPeaks(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own base is not typed
    """Notes the peak between one operator that a preset may keep and the next, while a forward runs.

    Args:
        tracker: active outside of this mode; its peak is reset.
    """

    def __init__(self, tracker: LiveTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracker, self._base = tracker, tracker.live
        self._parts: list[_Part] = []
        self._number = StorageNumbers().of
        self._changed: set[int] = set()  # storages that operators have changed in place
        tracker.reset_peak()

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole forward, above what was alive before."""
        return max(self._last, *(part.peak_before for part in self._parts), 0)

    def second_peak(self, preset: str) -> int | None:
        """The peak of a forward that is given the outputs of a preset's operators, above what was alive and these.

        None if there is no such forward, because the first one changes such an output in place.
        """
        choice, given, most = SaveChoice(preset), 0, 0
        for part in self._parts:
            most = max(most, part.peak_before - given)
            if choice.keeps(part.name):
                if part.outputs.keys() & self._changed:
                    return None
                given += sum(part.outputs.values())
        return max(most, self._last - given)

    @property
    def _last(self) -> int:
        return self._tracker.peak - self._base

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, operator_name(func)
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            self._changed |= {self._number(tensor) for tensor in _strided(_written(func, args, kwargs))}
        if name not in _NAMES:
            return func(*args, **kwargs)
        before = self._last
        result = func(*args, **kwargs)
        outputs = {self._number(tensor): self._tracker.counted_bytes(tensor) for tensor in _strided(result)}
        self._parts.append(_Part(before, name, outputs))
        self._tracker.reset_peak()
        return result


class _Part(NamedTuple):
    """An operator whose outputs may be kept.

    Args:
        peak_before: the peak since the one before it.
        name: its name.
        outputs: bytes of its outputs by storage.
    """

    peak_before: int
    name: str
    outputs: dict[int, int]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator changes."""
    given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
    return [
        given[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in given
    ]


def _strided(values: Any) -> list[Tensor]:
    """The tensors that have a storage."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.layout is torch.strided]
