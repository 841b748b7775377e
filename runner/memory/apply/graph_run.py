"""Runs the layers of a stage by a graph program: what autograd saves is dropped, and made again when its time has come.

The first forward builds the autograd graph that there is without a program, so gradients are added up in the same
order. Hooks take what it saves: tensors between layers are kept once, by storage, and a layer's other tensors in a
list. Before a layer's backward, the program's layers run again on detached inputs, in a graph that is thrown away, and
hooks take what is saved in the same order. A second run has the random numbers of the first one, and copies of the
buffers that the first one changed. A tensor that is not there and that a layer only passes on is replaced by one
without memory. So is an input that only operators read whose outputs were kept from the first run: what autograd saves
of it lies in a tensor between layers, which is there when the backward needs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._fuser import optimized_execution

from runner.memory.apply.kept_operators import KeptOutputs
from runner.memory.apply.surroundings import Surroundings
from runner.memory.solve.values import GraphProgram, Rerun
from runner.model.boundary import flatten, unflatten
from runner.model.buffers import BufferSnapshot, ChangedBuffers
from runner.model.layers import Part, StageModule

__all__ = ["MicroBatch", "install_graph", "run_graphs", "tensors_in"]

_Run = Callable[[Any], Any]


def install_graph(stage: StageModule, program: GraphProgram) -> None:
    """Let a stage run a graph program."""
    run_graphs(stage, partial(MicroBatch, program))


def run_graphs(stage: StageModule, begin: Callable[[Any], MicroBatch]) -> None:
    """Let a stage run graph programs, each layer as a part.

    Args:
        stage: the stage.
        begin: begins a micro-batch from the stage's input.
    """
    runner = _StageRunner(stage, begin)
    layers = range(stage.first_layer, stage.last_layer + 1)
    stage.wrap([Part(layer, layer, partial(runner.forward, layer)) for layer in layers])


class _StageRunner:
    """Begins a micro-batch at the first layer, and gives the others to it; see :func:`run_graphs`."""

    def __init__(self, stage: StageModule, begin: Callable[[Any], MicroBatch]) -> None:
        self._stage, self._begin = stage, begin
        self._current: MicroBatch | None = None

    def forward(self, layer: int, run: _Run, value: Any, *, seeded: bool) -> Any:
        """Run a layer for the first time."""
        if not torch.is_grad_enabled():
            return run(value)
        if layer == self._stage.first_layer:
            self._current = self._begin(value)
        assert self._current is not None  # its first layer has run
        output = self._current.forward(layer, run, value, self._stage.layers_between(layer, layer), seeded=seeded)
        if layer == self._stage.last_layer:
            self._current = None  # from now on, autograd's graph alone holds it
        return output


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in a storage, which is looked up by its number when the tensor is needed."""

    number: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


_Slot = Tensor | _Place | None
"""One tensor that autograd saved: itself, its place in a tensor between layers, or None if it was dropped or used."""


@dataclass(frozen=True)
class _Leaf:
    """A tensor of a layer's input: itself if it is the stage's own input, else its place; and its form."""

    place: Tensor | _Place
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class _Layer:
    """What is known of one layer's first run.

    Args:
        index: index in the whole model.
        run: runs it.
        keeps_graph: whether what its autograd saves in the first run is kept.
        leaves, structure: its input; empty if it is not run again.
        surroundings: what else its second run needs; None if it has none.
        before: its buffers before the first run.
        slots: what autograd saved, in order.
        kept: outputs of operators that are kept for another run; None if there are none.
    """

    index: int
    run: _Run
    keeps_graph: bool
    leaves: list[_Leaf]
    structure: Any
    surroundings: Surroundings | None
    before: BufferSnapshot
    slots: list[_Slot] = field(default_factory=list)
    kept: KeptOutputs | None = None


class MicroBatch:
    """The tensors of one forward and its backward. Autograd's graph holds it; it holds nothing of that graph.

    Args:
        program: the stage's program.
        value: the stage's input.
    """

    def __init__(self, program: GraphProgram, value: Any) -> None:
        self._program, self._again = program, frozenset(program.reruns)
        self._due = program.last  # the next layer whose backward is prepared
        self._layers: dict[int, _Layer] = {}
        self._tensors: dict[int, Tensor] = {}  # storage number -> a detached tensor with this storage
        self._dtypes: dict[int, torch.dtype] = {}
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # storage -> its number
        self._given: weakref.WeakSet[Any] = weakref.WeakSet(each.untyped_storage() for each in tensors_in(value))

    def forward(self, index: int, run: _Run, value: Any, modules: Sequence[nn.Module], *, seeded: bool) -> Any:
        """Run a layer for the first time.

        Args:
            index: the layer.
            run, value, seeded: see :class:`runner.model.layers.Around`.
            modules: its modules.
        """
        own = modules if index in self._again else ()
        layer = self._layers[index] = self._begin(index, run, value, own, seeded=seeded)
        versions = [tensor._version for tensor in tensors_in(value)]
        hooks = torch.autograd.graph.saved_tensors_hooks(partial(self._pack, layer), partial(self._unpack, layer))
        with hooks, optimized_execution(False), layer.kept.keeping() if layer.kept is not None else nullcontext():
            output = run(value)
        if versions != [tensor._version for tensor in tensors_in(value)]:
            raise RuntimeError(
                f"layer {index} changes its input in place, so that it could not be run from it again under a graph "
                "program: use operators that are not in place, or another activation_checkpoint"
            )
        layer.before.forget_unchanged()
        made = [tensor for tensor in tensors_in(output) if tensor.untyped_storage() not in self._numbers]
        self._number(index, output)
        self._keep(output, set(self._program.keeps))
        self._place(layer)
        for tensor in made:
            if tensor.grad_fn is not None:  # so that all is prepared before the first node, which may save nothing
                tensor.register_hook(partial(self._reached, index))  # type: ignore[no-untyped-call]
        return output

    def _begin(self, index: int, run: _Run, value: Any, modules: Sequence[nn.Module], *, seeded: bool) -> _Layer:
        keeps_graph = self._program.keeps_graph[index - self._program.first]
        before = ChangedBuffers(modules).snapshot()
        if not modules:
            return _Layer(index, run, keeps_graph, [], None, None, before)
        tensors, structure = flatten(value)
        own = [self._leaf(tensor) for tensor in tensors]
        preset = self._program.leaves(index)
        kept = KeptOutputs(index, preset) if preset is not None else None
        return _Layer(index, run, keeps_graph, own, structure, Surroundings(value, seeded=seeded), before, kept=kept)

    def _leaf(self, tensor: Tensor) -> _Leaf:
        if tensor.untyped_storage() in self._given:
            return _Leaf(tensor.detach(), tensor.dtype, tensor.requires_grad)
        return _Leaf(self._place_of(tensor), tensor.dtype, tensor.requires_grad)

    def _place_of(self, tensor: Tensor) -> _Place:
        number = self._numbers[tensor.untyped_storage()]
        return _Place(number, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _number(self, index: int, output: Any) -> None:
        """Give the storages of a layer's output the numbers that they have in the program."""
        first: dict[Any, torch.dtype] = {}
        for tensor in tensors_in(output):
            if self._program.first == 0 or tensor.untyped_storage() not in self._given:
                first.setdefault(tensor.untyped_storage(), tensor.dtype)
        known = self._program.outputs[index - self._program.first]
        if len(first) != len(known):
            raise RuntimeError(
                f"layer {index} has returned tensors in {len(first)} storages, and in {len(known)} in its profile; "
                "what a graph program keeps was planned for those"
            )
        for (storage, dtype), number in zip(first.items(), known, strict=True):
            if storage not in self._given:
                self._numbers[storage] = number
                self._dtypes[number] = dtype

    def _keep(self, output: Any, numbers: set[int]) -> None:
        """Keep the tensors of an output whose storages have these numbers."""
        for tensor in tensors_in(output):
            number = self._numbers.get(tensor.untyped_storage())
            if number is not None and number in numbers and number not in self._tensors:
                assert not tensor.is_meta  # it was made from tensors that are there
                self._tensors[number] = tensor.detach()

    def _place(self, layer: _Layer) -> None:
        """Let slots that lie in tensors between layers refer to these, which are kept or dropped by themselves."""
        for at, slot in enumerate(layer.slots):
            if isinstance(slot, Tensor) and self._is_numbered(slot):
                place = self._place_of(slot)
                if self._dtypes[place.number] == slot.dtype:
                    layer.slots[at] = place

    def _reached(self, index: int, gradient: Tensor) -> None:
        self.reach(index)

    def reach(self, index: int) -> None:
        """Prepare the backward of a layer, and of all behind it whose backwards needed nothing."""
        while self._due >= index:
            layer, self._due = self._due, self._due - 1
            self._prepare(layer)

    def _prepare(self, index: int) -> None:
        """Run layers again, let the layer's slots hold their tensors, and drop what later backwards do not need."""
        moment = self._program.backwards[index - self._program.first]
        for rerun in moment.before:
            self._rerun(rerun)
        slots = self._layers[index].slots
        for at, slot in enumerate(slots):
            if isinstance(slot, _Place):
                slots[at] = self._at(slot)
        for number in moment.drops:
            self._tensors.pop(number, None)

    def _rerun(self, rerun: Rerun) -> None:
        layer = self._layers[rerun.layer]
        assert layer.surroundings is not None  # the program said that it runs again
        blanks: dict[int, Tensor] = {}
        value = unflatten([self._input(leaf, blanks) for leaf in layer.leaves], layer.structure)
        found: list[_Slot] = []

        def pack(tensor: Tensor) -> None:
            found.append(_held(tensor) if rerun.keeps_graph else None)

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, _no_backward)
        given = layer.kept.giving() if rerun.given and layer.kept is not None else nullcontext()
        with layer.surroundings.restored(), layer.before.restored(fresh=True), torch.enable_grad(), hooks, given:
            output = layer.run(value)
        _compare(layer, found)
        found = [
            then if isinstance(now, Tensor) and now.is_meta else now
            for now, then in zip(found, layer.slots, strict=True)
        ]
        self._number(rerun.layer, output)
        self._keep(output, set(rerun.keeps))
        if rerun.keeps_graph:
            layer.slots = found
            self._place(layer)
        for number in rerun.drops:
            self._tensors.pop(number, None)

    def _input(self, leaf: _Leaf, blanks: dict[int, Tensor]) -> Tensor:
        """A tensor of an input for another run, which is not part of autograd's graph.

        Args:
            leaf: the tensor.
            blanks: tensors without memory by storage number, for those that are not there; they are only passed on, and
                an operator that reads one fails, because it is on another device.
        """
        if isinstance(leaf.place, Tensor):
            made = leaf.place.detach()
        elif leaf.place.number in self._tensors:
            made = self._at(leaf.place)
        else:
            blank = blanks.setdefault(leaf.place.number, torch.empty((), dtype=leaf.dtype, device="meta"))
            made = blank.expand(leaf.place.size)
        return made.requires_grad_(leaf.requires_grad)

    def _at(self, place: _Place) -> Tensor:
        return self._tensors[place.number].as_strided(place.size, place.stride, place.offset)

    def _pack(self, layer: _Layer, tensor: Tensor) -> int:
        is_between = layer.kept is not None and self._is_numbered(tensor)
        held: _Slot = _held(tensor) if layer.keeps_graph else None
        layer.slots.append(self._place_of(tensor) if is_between and not layer.keeps_graph else held)
        return len(layer.slots) - 1

    def _is_numbered(self, tensor: Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage() in self._numbers

    def _unpack(self, layer: _Layer, slot: int) -> Tensor:
        self.reach(layer.index)
        found, layer.slots[slot] = layer.slots[slot], None
        if not isinstance(found, Tensor):
            raise RuntimeError(
                f"the backward of layer {layer.index} needs a saved tensor that was dropped after its use: a second "
                "backward through one forward is not possible under a graph program"
            )
        return found


def _held(tensor: Tensor) -> Tensor:
    """The tensor without its part of the graph, which would otherwise hold itself."""
    return tensor if tensor.is_leaf else tensor.detach()


def _compare(layer: _Layer, found: Sequence[_Slot]) -> None:
    """Raise an error if a layer has not done the same as in its first run."""
    if len(found) != len(layer.slots):
        raise RuntimeError(
            f"autograd saved {len(layer.slots)} tensors in the first run of layer {layer.index}, and {len(found)} when "
            "it was run again: it must do the same in every run"
        )


def _no_backward(dropped: None) -> Tensor:
    raise RuntimeError("a graph that was made to run a layer again has no backward")


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, in order, each once."""
    return flatten(value)[0]
