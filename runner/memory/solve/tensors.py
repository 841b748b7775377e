"""Tensors between a stage's layers: what keeps each from forward to backward, and in which row it is counted.

A tensor that layers only pass on is one tensor, however many outputs it is part of. It is counted in the row of the
first layer that keeps it, because that layer's backward is the last to need it. A tensor that leaves the stage is
counted in the last row, because the caller holds it until the whole backward is over. Inputs of the stage belong to
its caller and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from runner.profile import LayerProfile

__all__ = ["StageTensors"]


class StageTensors:
    """Counts the bytes of tensors between layers, by storage.

    Args:
        before: the layer before the stage, None for the first stage.
        chain: the stage's layers, and the loss if the stage is the last.
    """

    def __init__(self, before: LayerProfile | None, chain: Sequence[LayerProfile]) -> None:
        self._chain = chain
        self._given = _output(before, -1) if before is not None else {}
        self._outputs = [
            {storage: size for storage, size in _output(layer, at).items() if storage not in self._given}
            for at, layer in enumerate(chain)
        ]
        self._row: dict[int, int] = {}  # storage -> the row in which it is counted

    def hold_saved(self, at: int) -> None:
        """Note that autograd keeps what a layer saves."""
        self.hold(self.saves(at), at)

    def hold_input(self, at: int) -> None:
        """Note that a layer's whole input is kept."""
        self.hold(self.inputs(at), at)

    def hold_output(self, at: int) -> None:
        """Note that a layer's whole output is kept."""
        self.hold(self._outputs[at], at)

    def hold_to_the_end(self) -> None:
        """Note that the stage's output is kept until its backward is over."""
        self._row |= dict.fromkeys(self._outputs[-1], len(self._chain) - 1)

    def hold(self, storages: Iterable[int], at: int) -> None:
        """Note that storages are kept, and count them in a layer's row, or in an earlier one that keeps them."""
        for storage in storages:
            self._row[storage] = min(at, self._row.get(storage, at))

    def inputs(self, at: int) -> Mapping[int, int]:
        """Bytes of a layer's input by storage, without inputs of the stage."""
        return self._outputs[at - 1] if at else {}

    def outputs(self, at: int) -> Mapping[int, int]:
        """Bytes of a layer's output by storage, without inputs of the stage."""
        return self._outputs[at]

    def made(self, at: int) -> dict[int, int]:
        """Bytes of a layer's output by storage, without what the layer only passes on."""
        before = self.inputs(at)
        return {storage: size for storage, size in self._outputs[at].items() if storage not in before}

    def saves(self, at: int) -> set[int]:
        """The storages of a layer's input and output that its autograd keeps."""
        layer = self._chain[at]
        if layer.output:
            return set(layer.saves)
        return {*(self.inputs(at) if layer.saves_input else ()), *(self._outputs[at] if layer.saves_output else ())}

    def output(self, at: int) -> tuple[int, ...]:
        """The storages of a layer's whole output, in order, without those of tensors that an earlier stage has made."""
        return tuple(self._outputs[at])

    @property
    def leaving(self) -> set[int]:
        """The storages that leave the chain and that its layers have made: the stage's output, or the loss."""
        return set(self._outputs[-1])

    def made_bytes(self, at: int) -> int:
        """The sum of :meth:`made`."""
        return sum(self.made(at).values())

    def callers_gradient_bytes(self, at: int) -> int:
        """Bytes of the gradient of a layer's output that the stage's caller holds: they pass through unchanged."""
        own = self._chain[at].output
        return sum(each.gradient_bytes for each in own if self._last_use_of_leaving.get(each.storage, at + 1) <= at)

    def callers_used(self, at: int) -> dict[int, int]:
        """The part of :meth:`callers_gradient_bytes` that a layer's backward uses, by storage: it is not freed then.

        The layer has made the tensor, or is the last whose autograd keeps it. If it has made and saved it, the
        tensor is not freed either, and is counted with its gradient.
        """
        made, last_use, saves = self.made(at), self._last_use_of_leaving, self.saves(at)
        leaving = (each for each in self._chain[at].output if each.storage in last_use)
        return {
            each.storage: each.gradient_bytes + (each.num_bytes if each.storage in made.keys() & saves else 0)
            for each in leaving
            if last_use[each.storage] == at or (each.storage in made and last_use[each.storage] < at)
        }

    def shared_gradient_bytes(self, at: int) -> int:
        """What gradients of a layer's output that wait for its backward keep besides, as parts of larger tensors.

        The gradient of a skip connection that was concatenated is alive with the gradient of the whole, until it is
        added to the gradient of another use.
        """
        waiting = {tensor.storage: tensor.gradient_bytes for tensor in self._chain[at].output}
        total = 0
        for layer in self._chain[at + 1 :]:
            for shared in layer.shared_gradients:
                parts = [waiting[storage] for storage in shared.storages if storage in waiting]
                total += max(0, shared.num_bytes - sum(parts)) if parts else 0
            for storage in layer.reads or ():
                waiting.pop(storage, None)
        return total

    def absent_gradient_bytes(self, at: int) -> int:
        """Bytes of gradients of a layer's output that are not there, as no later layer reads the tensors.

        These are tensors that the layer only passes on. If it reads them, too, it may make its own part of the gradient
        at any time, so that its row counts the absent one.
        """
        layer = self._chain[at]
        used = self._last_use_of_leaving.keys() | self._read_after(at)
        before = {tensor.storage for tensor in (self._chain[at - 1].output if at else ())} - used
        before -= set(before if layer.reads is None else layer.reads)
        return sum(tensor.gradient_bytes for tensor in layer.output if tensor.storage in before)

    def _read_after(self, at: int) -> set[int]:
        """The storages that later layers read."""
        return {
            storage
            for layer, before in zip(self._chain[at + 1 :], self._chain[at:], strict=False)
            for storage in (layer.reads if layer.reads is not None else [tensor.storage for tensor in before.output])
        }

    def with_present_gradients(self, rows: Sequence[LayerProfile]) -> list[LayerProfile]:
        """The rows of the chain without gradients of outputs that are absent."""
        absent = [self.absent_gradient_bytes(at) for at in range(len(self._chain))]
        return [
            replace(row, output_gradient_bytes=row.gradient_of_output_bytes - num_bytes) if num_bytes else row
            for row, num_bytes in zip(rows, absent, strict=True)
        ]

    def with_shared_gradients(self) -> list[LayerProfile]:
        """The chain's rows, in which the gradient of an output is with what it keeps besides."""
        if not any(layer.shared_gradients for layer in self._chain):
            return list(self._chain)
        more = [self.shared_gradient_bytes(at) for at in range(len(self._chain))]
        return [
            replace(layer, output_gradient_bytes=layer.gradient_of_output_bytes + num_bytes) if num_bytes else layer
            for layer, num_bytes in zip(self._chain, more, strict=True)
        ]

    @cached_property
    def _last_use_of_leaving(self) -> dict[int, int]:
        """For each storage of the stage's output, the last layer whose autograd keeps it; -1 if none does."""
        last = {tensor.storage: -1 for tensor in self._chain[-1].output}
        for at in range(len(self._chain)):
            last.update(dict.fromkeys(self.saves(at) & last.keys(), at))
        return last

    def given_bytes(self, storages: Iterable[int]) -> int:
        """Bytes of those of the storages that are inputs of the stage."""
        return sum(self._given.get(storage, 0) for storage in set(storages))

    def row_of(self, storage: int) -> int | None:
        """The row in which a storage is counted, if a layer of the stage has made it and anything keeps it."""
        return self._row.get(storage)

    def size_of(self, storage: int) -> int:
        """The bytes of a storage that a layer of the stage has made."""
        return next((made[storage] for made in self._outputs if storage in made), 0)

    def counted_bytes(self, at: int) -> int:
        """Bytes that are counted in a layer's row."""
        near = {**self.inputs(at), **self._outputs[at]}
        return sum(size for storage, size in near.items() if self._row.get(storage) == at)

    def waiting_bytes(self, at: int) -> int:
        """Bytes of a layer's input that no earlier row counts; they are alive while the layer runs."""
        return sum(size for storage, size in self.inputs(at).items() if self._row.get(storage, at) >= at)

    def counted_before_bytes(self, start: int, at: int) -> int:
        """Bytes of the input of layer ``start`` that are counted in a row before that of layer ``at``."""
        return sum(size for storage, size in self.inputs(start).items() if self._row.get(storage, at) < at)

    def held_output_bytes(self, at: int) -> int:
        """Bytes of a layer's output that are counted in its row."""
        return sum(size for storage, size in self._outputs[at].items() if self._row.get(storage) == at)

    def pending_output_bytes(self, at: int) -> int:
        """Bytes of a layer's output that are counted in a later row."""
        return sum(size for storage, size in self._outputs[at].items() if self._row.get(storage, at) > at)


def _output(layer: LayerProfile, at: int) -> dict[int, int]:
    """Bytes of a layer's output by storage; an unknown output is one tensor with a number that no known one has."""
    return {tensor.storage: tensor.num_bytes for tensor in layer.output} or {-at - 2: layer.output_bytes}
