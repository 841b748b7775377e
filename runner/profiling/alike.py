"""Profiles layers that are alike once.

Two layers are alike if their modules have the same classes, attributes and shapes, and if their inputs have the same
shapes and share memory in the same way. Fake tensors hold no values, so that nothing else can make a difference. Of
the second one only the output is made, which the next layer needs: the layer runs for it only if the output has memory
of the layer's input or weights in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from runner.model.boundary import Structure, enter_graph, flatten, map_tensors, unflatten
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.model.traced.module_structure import form_of, structure_of
from runner.profile import LayerProfile
from runner.profiling.backward_scan import as_leaf
from runner.profiling.layer import boundary_tensors, profile_call

__all__ = ["AlikeLayers"]


class AlikeLayers:
    """Profiles layers one after the other, and remembers their rows.

    Args:
        tracker: active.
        numbers: gives the storages of all rows distinct numbers.
    """

    def __init__(self, tracker: LiveTracker, numbers: StorageNumbers) -> None:
        self._tracker = tracker
        self._numbers = numbers
        self._known: dict[Hashable, _Known] = {}

    def profile(
        self, name: str, function: Callable[[Any], Any], value: Any, module: nn.Module
    ) -> tuple[Any, LayerProfile]:
        """A layer's detached output and its row, see :func:`runner.profiling.layer.profile_call`."""
        given = flatten(value)[0]
        if not given or not all(isinstance(tensor, FakeTensor) for tensor in given):
            return profile_call(name, function, value, self._tracker, self._numbers, module)
        key = structure_of(module), self._form(value)
        known = self._known.get(key)
        if known is not None:
            return self._again(known, name, function, value)
        output, row = profile_call(name, function, value, self._tracker, self._numbers, module)
        storages = [self._numbers.of(tensor) for tensor in (*given, *flatten(output)[0])]
        saved, read, written = (
            tuple(at for at, each in enumerate(storages) if each in some)
            for some in (row.saves, row.reads or (), row.writes)
        )
        self._known[key] = _Known(
            row, tuple(map(self._numbers.of, given)), saved, read, written, self._fresh_form(given, output)
        )
        return output, row

    def _fresh_form(self, given: Sequence[Tensor], output: Any) -> _Form | None:
        """The form of an output of which each tensor has memory of its own; None if one has not."""
        tensors, nesting = flatten(output)
        storages, before = [self._numbers.of(each) for each in tensors], {self._numbers.of(each) for each in given}
        has_own = len({*storages}) == len(storages) and before.isdisjoint(storages)
        if not has_own or any(self._tracker.counted_bytes(each) != each.nbytes for each in tensors):
            return None
        return _Form(
            tuple((each.size(), each.stride(), each.dtype, each.device) for each in tensors),
            tuple(each.requires_grad for each in tensors),
            nesting,
        )

    def _again(self, known: _Known, name: str, function: Callable[[Any], Any], value: Any) -> tuple[Any, LayerProfile]:
        if known.output is not None:
            made = known.output.made_beside(flatten(value)[0][0])
        else:
            made = function(enter_graph(map_tensors(as_leaf, value)))
        tensors = [*flatten(value)[0], *flatten(made)[0]]
        given = {self._numbers.of(tensor) for tensor in flatten(value)[0]}
        saves = {self._numbers.of(tensors[place]) for place in known.saved}
        reads = {self._numbers.of(tensors[place]) for place in known.read}
        writes = {self._numbers.of(tensors[place]) for place in known.written}
        output = boundary_tensors(made, self._tracker, self._numbers)
        now = {before: self._numbers.of(tensor) for before, tensor in zip(known.given, flatten(value)[0], strict=True)}
        shared = tuple(
            replace(each, storages=tuple(now[storage] for storage in each.storages))
            for each in known.row.shared_gradients
        )
        row = replace(
            known.row,
            name=name,
            output=output,
            saves=tuple(sorted(saves)),
            reads=tuple(sorted(reads & given)),
            writes=tuple(sorted(writes & given)),
            shared_gradients=shared,
        )
        return map_tensors(as_leaf, made), row

    def _form(self, value: Any) -> Hashable:
        """What is known of an input: its nesting, and of each tensor all but the values."""
        tensors, nesting = flatten(value)
        numbers = [self._numbers.of(tensor) for tensor in tensors]
        shared = tuple(map(numbers.index, numbers))
        counted = tuple(map(self._tracker.counted_bytes, tensors))
        return json.dumps(nesting), shared, counted, tuple(map(form_of, tensors))


@dataclass(frozen=True, slots=True)
class _Form:
    """All that is known of fake tensors with memory of their own: how each is made, and how they are nested."""

    tensors: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device], ...]
    requires_grad: tuple[bool, ...]
    nesting: Structure

    def made_beside(self, fake: Tensor) -> Any:
        """Such tensors; ``fake`` is another one."""
        made = [
            fake.new_empty_strided(size, stride, dtype=dtype, device=device)
            for size, stride, dtype, device in self.tensors
        ]
        for tensor, requires_grad in zip(made, self.requires_grad, strict=True):
            tensor.requires_grad_(requires_grad)
        return unflatten(made, self.nesting)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a layer.

    Args:
        row: its row.
        given: the storages of its input.
        saved, read, written: the places of saved, read and changed tensors in its input and then its output.
        output: the form of its output; None if it must run for it.
    """

    row: LayerProfile
    given: tuple[int, ...]
    saved: tuple[int, ...]
    read: tuple[int, ...]
    written: tuple[int, ...]
    output: _Form | None
