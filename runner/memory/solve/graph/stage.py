"""A stage as a graph of values, and the program that follows from an order of its computations.

The nodes are layers, not operators: a layer is what a user's model is made of, and the solvers take minutes for some
hundred values. For each layer there are its run, a value for each tensor that it gives to later layers, and a value for
all that its autograd saves besides. Later layers need only the tensors that they read: a layer that passes a skip
connection on does not. The loss is one more layer, which is never run again.

If asked for, a layer has further values: for a preset of operators, their outputs, which its first run may leave, and
the run that is given them. It takes less time, and none of a layer's input that only these operators read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runner.memory.solve.graph.values import Graph, Order, Value, last_uses
from runner.memory.solve.save_ops import OPERATORS
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.values import GraphProgram, LayerBackward, Rerun, StageChain
from runner.profile import LayerProfile, Recomputation

__all__ = [
    "StageGraph",
    "graph_of",
    "layer_chain",
    "needed_inputs",
    "operator_ways",
    "program_of_order",
    "stage_tensors",
]


def layer_chain(chain: StageChain) -> list[LayerProfile]:
    """The rows of a stage's layers, and of the loss if the stage is the last."""
    return [*chain.layers, *([chain.loss] if chain.loss is not None else [])]


def stage_tensors(chain: StageChain) -> StageTensors:
    """The tensors between the layers of a stage."""
    before = chain.profile.layers[chain.first - 1] if chain.first else None
    return StageTensors(before, layer_chain(chain))


def needed_inputs(layer: LayerProfile, given: Sequence[int]) -> tuple[int, ...]:
    """The storages of a layer's input without which it cannot run.

    A tensor that the layer only passes on is not among them.

    Args:
        layer: the layer's row.
        given: the storages of its input.
    """
    return tuple(given if layer.reads is None else (storage for storage in given if storage in layer.reads))


@dataclass(frozen=True)
class StageGraph:
    """A stage as a graph.

    Args:
        graph: its values: those of the forward, and then the backwards from the last layer to the first.
        num_forward: the number of values of the forward.
        layers: for each value its layer, counted from the first one of the stage; the loss is one more.
        storages: for each value that is a tensor between layers its storage.
        always: storages that are never dropped: the stage's output, weights, the batch.
        outputs: see :class:`GraphProgram`.
        first, last: the stage's layers.
        presets: for each value that is outputs of operators, or a run that is given these, the preset.
    """

    graph: Graph
    num_forward: int
    layers: tuple[int, ...]
    storages: dict[int, int]
    always: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]
    first: int
    last: int
    presets: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """The number of layers, without the loss."""
        return self.last - self.first + 1


def graph_of(chain: StageChain, *, with_operators: bool = False, followed: bool = False) -> StageGraph:
    """The graph of a stage with one micro-batch in flight.

    Args:
        chain: the stage.
        with_operators: whether layers may keep outputs of chosen operators.
        followed: whether others of its stage follow these layers; the gradient of their output is a value then, which
            is there before the first backward.
    """
    return _Maker(chain, with_operators=with_operators, followed=followed).made()


def operator_ways(layer: LayerProfile) -> dict[str, Recomputation]:
    """The presets of operators whose outputs are worth keeping instead of all that autograd saves of a layer.

    They are less than all of it, and spare some of the second forward. One that keeps the layer's own output is not
    among them, because this is a tensor between layers, which is kept or dropped by itself.
    """
    found: dict[str, Recomputation] = {}
    for preset in OPERATORS:
        known = layer.recomputation.get(preset)
        if known is None or known.second_peak_bytes is None or known.keeps_output or known in found.values():
            continue
        if 0 < known.kept_bytes < layer.saved_bytes and known.recomputed_flops < layer.forward_flops:
            found[preset] = known
    return found


class _Maker:
    """Makes the values of a stage in order."""

    def __init__(self, chain: StageChain, *, with_operators: bool, followed: bool) -> None:
        self._stage, self._with_operators, self._followed = chain, with_operators, followed
        self._chain = layer_chain(chain)
        self._tensors = stage_tensors(chain)
        self._values: list[Value] = []
        self._layers: list[int] = []
        self._runs: list[int] = []
        self._instead: dict[int, int] = {}
        self._presets: dict[int, str] = {}
        self._graphs: list[int] = []
        self._of_storage: dict[int, int] = {}
        self._always: list[int] = []
        self._gradient_free = {
            each.storage for layer in self._chain for each in layer.output if not each.gradient_bytes
        }
        self._leaving = self._tensors.leaving

    def made(self) -> StageGraph:
        for at in range(len(self._chain)):
            self._forward(at)
        num_forward, backward = len(self._values), {}
        if self._followed:
            given = self._add(len(self._chain), Value(0.0, self._chain[-1].gradient_of_output_bytes))
            backward[given] = given  # as what is computed once
        backward |= {self._runs[at]: self._backward(at) for at in range(len(self._chain) - 1, -1, -1)}
        ends = (num_forward - 1, *range(num_forward, len(self._values)))
        return StageGraph(
            Graph(tuple(self._values), ends, backward, self._instead),
            num_forward,
            tuple(self._layers),
            {index: storage for storage, index in self._of_storage.items()},
            tuple(self._always),
            tuple(self._tensors.output(at) for at in range(len(self._stage.layers))),
            self._stage.first,
            self._stage.last,
            self._presets,
        )

    def _add(self, at: int, value: Value) -> int:
        self._values.append(value)
        self._layers.append(at)
        return len(self._values) - 1

    def _forward(self, at: int) -> None:
        """The run of a layer, its tensors, and what its autograd saves besides."""
        layer, made = self._chain[at], self._tensors.made(at)
        given = [storage for storage in self._tensors.inputs(at) if storage in self._of_storage]
        read = tuple(self._of_storage[storage] for storage in needed_inputs(layer, given))
        alone = layer.unsaved_forward_bytes
        running = layer.saved_bytes + layer.forward_transient_bytes if alone is None else alone
        run = self._add(at, Value(layer.forward_seconds, 0, read, running, is_run=True))
        self._runs.append(run)
        if self._with_operators and at < len(self._stage.layers):
            self._operators(at, run, given)
        for storage, num_bytes in made.items():
            if num_bytes and storage not in self._leaving and storage not in self._gradient_free:
                self._of_storage[storage] = self._add(at, Value(0.0, num_bytes, (run,)))
            else:
                self._always.append(storage)
        inner = layer.saved_bytes - sum(made.values())
        graph = Value(0.0, max(0, inner), (run, *read), layer.forward_transient_bytes)
        self._graphs.append(self._add(at, graph))

    def _operators(self, at: int, run: int, given: Sequence[int]) -> None:
        """For each preset that is worth it what the first run leaves, and the run that is given it."""
        layer = self._chain[at]
        ordinary = layer.saved_bytes + layer.forward_transient_bytes
        for preset, known in operator_ways(layer).items():
            dropping = (layer.unsaved_forward_bytes or ordinary) + known.kept_bytes
            besides = max(0, min(ordinary, dropping) - known.kept_bytes)
            left = self._add(at, Value(0.0, known.kept_bytes, (run,), besides, is_optional=True))
            read = (each for each in needed_inputs(layer, given) if each not in known.unread)
            needs = (left, *(self._of_storage[each] for each in read))
            seconds = layer.forward_seconds * known.recomputed_flops / layer.forward_flops
            besides = known.second_peak_bytes or 0
            again = self._add(at, Value(seconds, 0, tuple(sorted(needs)), besides, is_run=True, is_optional=True))
            self._instead[again] = run
            self._presets |= {left: preset, again: preset}

    def _backward(self, at: int) -> int:
        """The backward of a layer; its result are the gradients of all that goes into the layer."""
        layer = self._chain[at]
        saved = sorted(self._of_storage[each] for each in self._tensors.saves(at) if each in self._of_storage)
        later = (len(self._values) - 1,) if self._followed or at < len(self._chain) - 1 else ()
        before = self._chain[at - 1].gradient_of_output_bytes if at else 0
        besides = max(0, layer.inner_backward_bytes - before)
        needs = (*saved, self._graphs[at], *later)
        return self._add(at, Value(layer.backward_seconds, before, needs, besides))


def program_of_order(stage: StageGraph, order: Order) -> GraphProgram:
    """The program of an order that computes the forward's values once, and then the backwards and what they need.

    A value is kept until its last use before it is computed again. A layer whose results are not used is not run.

    Raises:
        ValueError: a backward is computed twice, which autograd does not do.
    """
    if sum(index in stage.graph.backwards for index in order) > len(stage.graph.backwards):
        raise ValueError("a backward runs once, and the order has it twice")
    return _Reader(stage, order).program()


class _Reader:
    """Goes through the backwards of an order, and notes what happens before each."""

    def __init__(self, stage: StageGraph, order: Order) -> None:
        self._stage, self._order = stage, order
        self._last_use = last_uses(stage.graph, order)
        self._begin = order.index(stage.num_forward - 1) + 1  # the position after the first forward
        self._backward = {value: stage.layers[run] for run, value in stage.graph.backward.items()}
        self._dropped: dict[int, list[int]] = defaultdict(list)  # position -> storages that it uses last
        for position, index in enumerate(order):
            if index in stage.storages:
                self._dropped[self._last_use[position]].append(stage.storages[index])

    def program(self) -> GraphProgram:
        stage, begin = self._stage, self._begin
        kept = {self._order[position] for position in range(begin) if self._last_use[position] >= begin}
        operators = {stage.layers[index]: stage.presets[index] for index in kept if index in stage.presets}
        graphs = {
            stage.layers[index]
            for index in kept
            if index not in stage.storages and index not in stage.presets and not stage.graph.values[index].is_run
        }
        storages = (stage.storages[index] for index in sorted(kept) if index in stage.storages)
        return GraphProgram(
            stage.first,
            stage.last,
            tuple(at in graphs for at in range(stage.num_layers)),
            (*stage.always, *storages),
            stage.outputs,
            self._backwards(),
            tuple(operators.get(at) for at in range(stage.num_layers)) if operators else (),
        )

    def _backwards(self) -> tuple[LayerBackward, ...]:
        """What is done at each layer's backward; what the order does at the loss's comes with the next one."""
        found: dict[int, LayerBackward] = {}
        before: list[Rerun] = []
        drops: list[int] = []
        position = self._begin
        while position < len(self._order):
            index = self._order[position]
            end = self._end_of_run(position)
            used_last = [each for at in range(position, end) for each in self._dropped[at]]
            if index not in self._backward:
                rerun = self._rerun(position, end)
                is_loss = rerun.layer > self._stage.last  # autograd keeps the loss's graph, whatever the order says
                if (rerun.keeps or rerun.keeps_graph) and not is_loss:
                    before.append(rerun)
                    drops = [each for each in drops if each not in rerun.keeps]  # those are others, from now on
                else:
                    drops += rerun.drops
            elif (at := self._backward[index]) < self._stage.num_layers:
                found[at] = LayerBackward(tuple(before), (*drops, *used_last))
                before, drops = [], []
            else:
                drops += used_last
            position = end
        return tuple(found[at] for at in range(self._stage.num_layers))

    def _end_of_run(self, position: int) -> int:
        """The position after a run and its results, or after a backward."""
        end, layer = position + 1, self._stage.layers[self._order[position]]
        if self._order[position] in self._backward:
            return end
        while end < len(self._order) and self._is_result(self._order[end], layer):
            end += 1
        return end

    def _is_result(self, index: int, layer: int) -> bool:
        return (
            index not in self._backward
            and self._stage.layers[index] == layer
            and not self._stage.graph.values[index].is_run
        )

    def _rerun(self, position: int, end: int) -> Rerun:
        """The run of a layer from one position to another, with those results that are used later."""
        used = [self._order[at] for at in range(position + 1, end) if self._last_use[at] >= end]
        keeps = tuple(self._stage.storages[index] for index in used if index in self._stage.storages)
        fresh = {self._stage.storages[i] for i in self._order[position + 1 : end] if i in self._stage.storages}
        drops = [each for at in range(position, end) for each in self._dropped[at] if each not in fresh]
        layer = self._stage.layers[self._order[position]] + self._stage.first
        given = self._order[position] in self._stage.presets
        return Rerun(layer, len(keeps) < len(used), keeps, tuple(drops), given)
