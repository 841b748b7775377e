"""Programs that are chosen in the run, by the sizes of each micro-batch's input.

The plan knows the largest micro-batch, and takes for it the program that runs the fewest layers again within
memory_limit, those first that save most. A smaller one may keep the graphs of more layers. What its layers save is
measured when its sizes come for the first time, under the program of the largest; or estimated, where enough others
were measured that differ from it in one length alone. The peak of a program for these sizes follows from the rows of
the largest with what was measured instead, so it is at most what the plan has predicted, for all sizes.

Source: Liao et al. 2023, Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

from runner.memory.solve.graph.rows import graph_rows
from runner.memory.solve.graph.stage import StageGraph, program_of_order
from runner.memory.solve.shared_weights import SharedGradients
from runner.memory.solve.values import GraphProgram, PlainStage, StageProgram
from runner.profile import LayerProfile, SharedWeight

__all__ = ["LayerBytes", "PlansBySize", "Shapes", "SizedProgram", "ladder"]

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of the tensors of an input, in order."""

_ENOUGH = 4  # sizes that must have been measured: three make a quadratic function, and one more says whether it is one
_MARGIN = 0.01  # by which measured bytes may differ from it, and by which it is enlarged


class LayerBytes(NamedTuple):
    """What one layer keeps for some sizes of the input.

    Args:
        inner: bytes that its autograd saves besides tensors between layers.
        output: bytes of the storages of its output, by their numbers in the profile.
    """

    inner: int
    output: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SizedProgram(StageProgram):
    """Lets a run take another program for each micro-batch, by the sizes of its input.

    Args:
        first, last: the stage's layers, indices in the whole model, inclusive.
        chosen: the program of the largest micro-batch, as an index in ``steps``.
        steps: programs from the one that keeps everything to the one that runs all layers again that save anything.
        in_flight: the largest number of micro-batches whose saved tensors are alive at once.
        largest: the shapes of the stage's input in the largest micro-batch; empty = not known, as in later stages.
        before, layers, loss: the rows of the largest micro-batch, see :class:`runner.memory.solve.values.PlainStage`.
        shared: the weights that several layers of the model share.
    """

    first: int
    last: int
    chosen: int
    steps: tuple[GraphProgram, ...]
    in_flight: int
    largest: Shapes
    before: LayerProfile | None = field(hash=False)
    layers: tuple[LayerProfile, ...] = field(hash=False)
    loss: LayerProfile | None = field(hash=False)
    shared: tuple[SharedWeight, ...] = ()

    installer: ClassVar[str] = "runner.memory.apply.by_size:install_by_size"

    @property
    def forwards(self) -> int:
        """See :class:`runner.memory.solve.values.StageProgram`; those of the largest micro-batch."""
        return self.steps[self.chosen].forwards

    def rows(self, stage: PlainStage) -> list[LayerProfile]:
        """See :class:`runner.memory.solve.values.StageProgram`; those of the largest micro-batch."""
        return self.steps[self.chosen].rows(stage)


def ladder(stage: StageGraph) -> tuple[GraphProgram, ...]:
    """Programs that run more and more layers again, each right before its backward; those first that save most."""
    values = stage.graph.values[: stage.num_forward]
    inner = {  # what autograd saves of a layer besides tensors between layers
        stage.layers[index]: value.num_bytes
        for index, value in enumerate(values)
        if not value.is_run and index not in stage.storages and stage.layers[index] < stage.num_layers
    }
    largest = sorted((at for at, num_bytes in inner.items() if num_bytes), key=lambda at: (-inner[at], at))
    return tuple(_running_again(stage, frozenset(largest[:count])) for count in range(len(largest) + 1))


def _running_again(stage: StageGraph, again: frozenset[int]) -> GraphProgram:
    """The program that keeps all tensors between layers, and runs some layers again."""
    values, count = stage.graph.values, stage.num_forward
    order = list(range(count))
    for backward in range(count, len(values)):
        if (at := stage.layers[backward]) in again:
            own = (index for index in range(count) if stage.layers[index] == at)
            order += (index for index in own if index not in stage.storages)  # its run, and what its autograd saves
        order.append(backward)
    return program_of_order(stage, tuple(order))


class PlansBySize:
    """The programs of a stage by sizes, from what is measured in its run.

    Args:
        program: the stage's program.
    """

    def __init__(self, program: SizedProgram) -> None:
        self._program = program
        self._measured: dict[Shapes, list[LayerBytes]] = {}
        self._plans: dict[Shapes, GraphProgram] = {}
        self._most = self._peak(program.steps[program.chosen], program.layers)

    def program(self, shapes: Shapes) -> GraphProgram:
        """The program of a micro-batch whose input has these shapes.

        Raises:
            RuntimeError: it is larger than the one that was planned for.
        """
        if shapes not in self._plans:
            self._refuse_larger(shapes)
            self._plans[shapes] = self._planned(self._measured.get(shapes) or self._estimated(shapes))
        return self._plans[shapes]

    def is_measured(self, shapes: Shapes) -> bool:
        """Whether what the layers save for these shapes was measured."""
        return shapes in self._measured

    def note(self, shapes: Shapes, found: Sequence[LayerBytes]) -> None:
        """Take what was measured of each layer; the next micro-batch of these shapes is planned anew."""
        self._plans = {each: plan for each, plan in self._plans.items() if each in self._measured}  # not estimated ones
        self._measured[shapes] = list(found)

    def _refuse_larger(self, shapes: Shapes) -> None:
        largest = self._program.largest
        alike = [len(each) for each in shapes] == [len(each) for each in largest]
        if largest and not (alike and all(a <= b for a, b in zip(_lengths(shapes), _lengths(largest), strict=True))):
            raise RuntimeError(
                f"a micro-batch has the shapes {list(map(list, shapes))}, and activation_checkpoint=mimose has planned "
                f"for {list(map(list, largest))} at most: let the data function's `spec` return a sample that makes "
                "the largest batch"
            )

    def _estimated(self, shapes: Shapes) -> list[LayerBytes] | None:
        """What the layers save, by a function of the length in which others differ; None if that is not known."""
        lines: dict[tuple[int, ...], dict[int, list[LayerBytes]]] = defaultdict(dict)
        for each, found in self._measured.items():
            if (place := _differing(shapes, each)) is not None:
                places, length = place
                lines[places][length] = found
        for places, known in lines.items():
            if (estimate := _quadratic(known, _lengths(shapes)[places[0]])) is not None:
                return estimate
        return None

    def _planned(self, found: Sequence[LayerBytes] | None) -> GraphProgram:
        """The program that runs the fewest layers again, within the peak and what others in flight leave."""
        steps, chosen = self._program.steps, self._program.chosen
        if found is None:
            return steps[chosen]
        layers = _sized(self._program, found)
        kept, peak = self._most
        for step in steps[:chosen]:
            own_kept, own_peak = self._peak(step, layers)
            if own_peak <= peak and (own_kept <= kept or self._program.in_flight == 1):
                return step
        return steps[chosen]

    def _peak(self, program: GraphProgram, layers: Sequence[LayerProfile]) -> tuple[int, int]:
        """What one micro-batch keeps from its forward to its backward, and the most that is alive in one of them."""
        own = self._program
        shared = SharedGradients(len(layers) + (own.loss is not None), own.shared, own.first)
        rows = graph_rows(own.before, list(layers), own.loss, program, shared)
        kept, peak = 0, 0
        for row in rows:
            kept += row.saved_bytes
            peak = max(peak, kept + row.forward_transient_bytes)
            if row is not rows[-1]:
                peak = max(peak, kept + row.gradient_of_output_bytes + row.inner_backward_bytes)
        return kept, max(peak, kept + rows[-1].backward_transient_bytes)


def _sized(program: SizedProgram, found: Sequence[LayerBytes]) -> list[LayerProfile]:
    """The rows of the largest micro-batch with other bytes between forward and backward; temporaries stay."""
    sizes: dict[int, int] = {}
    rows, before = [], set[int]()
    for row, own, outputs in zip(program.layers, found, program.steps[0].outputs, strict=True):
        fresh = [storage for storage in outputs if storage not in before]
        sizes |= own.output
        output = tuple(
            replace(each, num_bytes=min(each.num_bytes, sizes.get(each.storage, each.num_bytes))) for each in row.output
        )
        saved = own.inner + sum(each.num_bytes for each in output if each.storage in fresh)
        rows.append(replace(row, output=output, saved_bytes=min(saved, row.saved_bytes)))
        before = set(outputs)
    return rows


def _quadratic(known: Mapping[int, list[LayerBytes]], length: int) -> list[LayerBytes] | None:
    """What a quadratic function of a length says; None if there are too few, none beyond it, or another function.

    Args:
        known: what was measured, by the length.
        length: the length for which it is not known.
    """
    if len(known) < _ENOUGH or not min(known) <= length <= max(known):
        return None
    import numpy as np

    rows = ([each for own in found for each in (own.inner, *own.output.values())] for found in known.values())
    numbers = np.array(list(rows))
    powers = np.vander(np.array(list(known)) / max(known), 3)
    factors = np.linalg.lstsq(powers, numbers, rcond=None)[0]
    if not np.allclose(powers @ factors, numbers, rtol=_MARGIN, atol=1.0):
        return None
    estimates = (np.vander([length / max(known)], 3) @ factors)[0].clip(0) * (1 + _MARGIN)
    made = map(math.ceil, estimates)
    some = next(iter(known.values()))
    return [LayerBytes(next(made), {storage: next(made) for storage in each.output}) for each in some]


def _lengths(shapes: Shapes) -> list[int]:
    return [length for shape in shapes for length in shape]


def _differing(shapes: Shapes, others: Shapes) -> tuple[tuple[int, ...], int] | None:
    """The places at which another input has one other length, and that length; None if they differ in more."""
    if [len(each) for each in shapes] != [len(each) for each in others]:
        return None
    own, other = _lengths(shapes), _lengths(others)
    places = tuple(at for at, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
    if len({own[at] for at in places}) != 1 or len({other[at] for at in places}) != 1:
        return None
    return places, other[places[0]]
