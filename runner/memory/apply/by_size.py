"""Runs each micro-batch of a stage by the program of its size, and measures what layers save for sizes that are new."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from runner.memory.apply.graph_run import MicroBatch, run_graphs, tensors_in
from runner.memory.solve.by_size import LayerBytes, PlansBySize, Shapes, SizedProgram
from runner.memory.solve.values import GraphProgram
from runner.model.dense_parts import dense_parts
from runner.model.layers import StageModule

__all__ = ["install_by_size"]


def install_by_size(stage: StageModule, program: SizedProgram) -> None:
    """Let a stage take the program of each micro-batch's size."""
    plans = PlansBySize(program)

    def begin(value: Any) -> MicroBatch:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(value))
        chosen = plans.program(shapes)
        return MicroBatch(chosen, value) if plans.is_measured(shapes) else _Measured(chosen, value, plans, shapes)

    run_graphs(stage, begin)


class _Measured(MicroBatch):
    """A micro-batch whose forward measures what each layer saves.

    Args:
        program, value: see :class:`MicroBatch`.
        plans: takes note of what was measured when the last layer has run.
        shapes: the shapes of the stage's input.
    """

    def __init__(self, program: GraphProgram, value: Any, plans: PlansBySize, shapes: Shapes) -> None:
        super().__init__(program, value)
        self._plans, self._shapes = plans, shapes
        self._found: list[LayerBytes] = []
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()  # storages that are there without the layer's autograd
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()
        self._inner = 0

    def forward(self, index: int, run: Any, value: Any, modules: Sequence[nn.Module], *, seeded: bool) -> Any:
        """See :class:`MicroBatch`."""
        states = (state for module in modules for state in (*module.parameters(), *module.buffers()))
        self._alive = weakref.WeakSet(tensor.untyped_storage() for tensor in dense_parts((*states, *tensors_in(value))))
        self._counted, self._inner = weakref.WeakSet(), 0
        output = super().forward(index, run, value, modules, seeded=seeded)
        made: dict[int, int] = {}
        for storage in dict.fromkeys(tensor.untyped_storage() for tensor in tensors_in(output)):
            if storage in self._numbers:
                made[self._numbers[storage]] = storage.nbytes()
                self._inner -= storage.nbytes() if storage in self._counted else 0
        self._found.append(LayerBytes(self._inner, made))
        if index == self._program.last:
            self._plans.note(self._shapes, self._found)
        return output

    def _pack(self, layer: Any, tensor: Tensor) -> int:
        for part in dense_parts([tensor]):
            storage = part.untyped_storage()
            if storage not in self._alive and storage not in self._counted:
                self._counted.add(storage)
                self._inner += storage.nbytes()
        return super()._pack(layer, tensor)
