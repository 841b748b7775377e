"""The rows of a stage's profile under a graph program: the program is played, and all that is alive is counted.

Unlike a chain program's, what is alive at the backward of a layer does not follow from what the layers before it save.
So a row's transient bytes are the rest that leads to the peak that was counted; it may be negative.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runner.memory.solve.second_run import recomputation
from runner.memory.solve.shared_weights import SharedGradients
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.undivided import BackwardPeaks, whole_peaks, with_undivided
from runner.memory.solve.values import GraphProgram, Rerun
from runner.profile import LayerProfile

__all__ = ["graph_rows"]


def graph_rows(
    before: LayerProfile | None,
    layers: list[LayerProfile],
    loss: LayerProfile | None,
    program: GraphProgram,
    shared: SharedGradients,
) -> list[LayerProfile]:
    """The rows of a stage's layers, and that of the loss if there is one.

    Args:
        before: the layer before the stage, None for the first stage.
        layers: the stage's layers.
        loss: the loss if the stage is the last.
        program: the stage's program.
        shared: the gradients of weights that several of its layers share.
    """
    return _Play(before, layers, loss, program, shared).rows()


class _Play:
    """The state of a stage while its program is played; layers are counted from the first of the stage."""

    def __init__(
        self,
        before: LayerProfile | None,
        layers: list[LayerProfile],
        loss: LayerProfile | None,
        program: GraphProgram,
        shared: SharedGradients,
    ) -> None:
        self._shared = shared
        chain = [*layers, loss] if loss is not None else layers
        self._loss, self._program, self._count = loss, program, len(layers)
        self._tensors = StageTensors(before, chain)
        self._unshared = self._tensors.with_present_gradients(chain)
        self._chain = [shared.row(at, layer) for at, layer in enumerate(self._unshared)]
        self._sizes: dict[int, int] = {}
        for at in range(len(self._chain)):
            self._sizes |= self._tensors.made(at)
        again = Counter(program.reruns)
        self._again = [again[program.first + at] for at in range(self._count)]
        self._left = {  # by layer, what its first run leaves of its operators
            at: layer.recomputation[preset]
            for at, layer in enumerate(layers)
            if (preset := program.leaves(program.first + at)) is not None
        }
        self._hold_what_is_kept()

    def _hold_what_is_kept(self) -> None:
        """Note in which row what is kept from the first forward is counted: in that of the layer that makes it."""
        kept = set(self._program.keeps)
        for at in range(len(self._chain)):
            self._tensors.hold(kept & self._tensors.made(at).keys(), at)
        if self._loss is not None:
            self._tensors.hold_saved(self._count)
        self._tensors.hold_to_the_end()

    def rows(self) -> list[LayerProfile]:
        saved = [self._saved(at) for at in range(len(self._chain))]
        forward = self._forward_peaks()
        of_i = [self._shared.undivided(at, layer) for at, layer in enumerate(self._unshared)]
        kinds = [[whole_peaks(layer) for layer in self._chain], of_i]
        backward, divided = self._backward_peaks(sum(saved), kinds)
        found, so_far = [], 0
        for at, layer in enumerate(self._chain):
            so_far += saved[at]
            row = self._timed(at, layer)
            held = self._tensors.held_output_bytes(at)
            own_gradient = 0 if self._is_end(at) else self._own_gradient(at)
            behind = sum(saved) - so_far - own_gradient - (0 if self._loss is not None else self._leaving_bytes())
            behind = 0 if self._is_end(at) else behind
            changed = replace(
                row.with_backward(backward[at] + behind + self._shared.behind(at)),
                saved_bytes=saved[at],
                forward_transient_bytes=forward[at] - so_far,
                output_gradient_bytes=layer.output_gradient_bytes if self._is_end(at) else own_gradient,
                held_output_bytes=None if held == layer.output_bytes else held,
                pending_output_bytes=self._tensors.pending_output_bytes(at),
                copied_bytes=self._copies(at) if at < self._count else 0,
            )
            waiting = self._shared.own(at, layer)
            found.append(changed if at == self._count else with_undivided(changed, waiting, divided[at] + behind))
        return found

    def _is_end(self, at: int) -> bool:
        return at == len(self._chain) - 1

    def _timed(self, at: int, layer: LayerProfile) -> LayerProfile:
        """The row with the seconds and FLOPs of its further forwards."""
        times = self._again[at] if at < self._count else 0
        if not times:
            return layer
        of_weights = layer.split_seconds[1]
        spared = layer.forward_flops - self._left[at].recomputed_flops if at in self._left else 0.0
        share = spared / layer.forward_flops if layer.forward_flops else 0.0
        return replace(
            layer,
            backward_flops=layer.backward_flops + times * layer.forward_flops - spared,
            backward_seconds=layer.backward_seconds + (times - share) * layer.forward_seconds,
            weight_gradient_seconds=of_weights,
        )

    def _inner(self, at: int) -> int:
        """What a layer's autograd saves besides tensors between layers."""
        return self._chain[at].saved_bytes - self._tensors.made_bytes(at)

    def _saved(self, at: int) -> int:
        """What is kept from the first forward and counted in a layer's row."""
        if at == self._count:
            return self._inner(at) + self._tensors.counted_bytes(at)
        return self._kept(at) + self._tensors.counted_bytes(at) + self._copies(at)

    def _kept(self, at: int) -> int:
        """What is kept from a layer's first run of what its autograd saves, and of its operators."""
        return self._left_bytes(at) + (self._inner(at) if self._keeps_graph(at) else 0)

    def _keeps_graph(self, at: int) -> bool:
        return at == self._count or self._program.keeps_graph[at]

    def _left_bytes(self, at: int) -> int:
        """What a layer's first run leaves of its operators, besides what its autograd saves if that is kept, too."""
        known = self._left.get(at)
        if known is None:
            return 0
        saved = recomputation(self._chain[at], None).recomputed_bytes - known.recomputed_bytes
        return known.kept_bytes - (saved if self._keeps_graph(at) else 0)

    def _copies(self, at: int) -> int:
        """Copies of running statistics, from which a layer is run again."""
        return self._chain[at].statistics_bytes if self._again[at] else 0

    def _leaving_bytes(self) -> int:
        return self._bytes(self._tensors.leaving)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._sizes.get(storage, 0) for storage in set(storages))

    def _own_gradient(self, at: int) -> int:
        """The gradient of a layer's output, without what the stage's caller holds."""
        layer = self._chain[at]
        if layer.output_gradient_bytes is None:
            return layer.gradient_of_output_bytes
        return layer.output_gradient_bytes - self._tensors.callers_gradient_bytes(at)

    def _forward_peaks(self) -> list[int]:
        """The most bytes alive in the forward of each layer, above what was alive before the stage."""
        kept, made, held = set(self._program.keeps), set[int](), 0
        peaks = []
        for at, layer in enumerate(self._chain):
            alive = held + self._bytes((made & kept) | set(self._tensors.inputs(at)))
            copies = self._copies(at) if at < self._count else 0
            peaks.append(alive + copies + (self._leaving(at) if not self._keeps_graph(at) else self._with_graph(layer)))
            held += copies + self._kept(at)
            made |= self._tensors.made(at).keys()
        return peaks

    @staticmethod
    def _with_graph(layer: LayerProfile) -> int:
        return layer.saved_bytes + layer.forward_transient_bytes

    def _without_graph(self, layer: LayerProfile) -> int:
        known = layer.unsaved_forward_bytes
        return self._with_graph(layer) if known is None else min(known, self._with_graph(layer))

    def _leaving(self, at: int) -> int:
        """The peak of a first run that leaves outputs of operators, if any."""
        layer = self._chain[at]
        left = self._left[at].kept_bytes if at in self._left else 0
        return min(self._without_graph(layer) + left, self._with_graph(layer))

    def _backward_peaks(self, saved: int, kinds: Sequence[Sequence[BackwardPeaks]]) -> list[list[int]]:
        """The most bytes alive in the backward of each layer, above what is alive when the stage's backward begins.

        What later layers have left of gradients of weights is not counted.

        Args:
            saved: what is kept from the stage's forward.
            kinds: for each kind of backward the peaks of the layers alone.
        """
        held = _Held(
            set(self._program.keeps) | self._tensors.leaving,
            {at: self._inner(at) for at in range(self._count) if self._program.keeps_graph[at]},
            {at: self._left_bytes(at) for at in self._left},
        )
        copies = sum(map(self._copies, range(self._count)))
        moments = [self._backward_of(at, held, copies) for at in range(self._count - 1, -1, -1)]
        of_loss = [self._loss.backward_transient_bytes] if self._loss is not None else []
        return [
            [max(before, alive + self._own(at, peaks[at])) - saved for at, (before, alive) in enumerate(moments[::-1])]
            + of_loss
            for peaks in kinds
        ]

    def _own(self, at: int, peaks: BackwardPeaks) -> int:
        """What a layer's backward takes by itself."""
        return peaks.alone if self._is_end(at) else peaks.beside(self._tensors.callers_used(at))

    def _backward_of(self, at: int, held: _Held, copies: int) -> tuple[int, int]:
        """The peak of what is done before a layer's backward, and what is alive when that begins.

        It changes what is alive to what is left after the backward.
        """
        moment = self._program.backwards[at]
        gradient = 0 if self._is_end(at) else self._own_gradient(at) + self._tensors.shared_gradient_bytes(at)
        peak = 0
        for rerun in moment.before:
            again = rerun.layer - self._program.first
            alive = self._alive(held) + copies + gradient
            peak = max(peak, alive + self._running_again(rerun) + self._chain[again].statistics_bytes)
            held.storages = (held.storages | set(rerun.keeps)) - set(rerun.drops)
            if rerun.given:
                del held.left[again]
            if rerun.keeps_graph:  # its own copies of statistics are what autograd saves
                held.graphs[again] = self._inner(again) + self._chain[again].statistics_bytes
        held.storages -= set(moment.drops) - self._tensors.saves(at)  # what autograd has not saved is dropped at once
        alive = self._alive(held) + copies + gradient
        held.storages -= set(moment.drops)
        held.graphs.pop(at, None)
        return peak, alive

    def _running_again(self, rerun: Rerun) -> int:
        """The peak of a later run of a layer, without copies of its statistics."""
        again = rerun.layer - self._program.first
        row = self._chain[again]
        running = self._with_graph(row) if rerun.keeps_graph else self._without_graph(row)
        given = self._left[again].second_peak_bytes if rerun.given else None
        return running if given is None else min(running, given)

    def _alive(self, held: _Held) -> int:
        return self._bytes(held.storages) + sum(held.graphs.values()) + sum(held.left.values())


@dataclass
class _Held:
    """What is alive between the backwards of layers, besides copies of statistics.

    Args:
        storages: the storages of tensors between layers.
        graphs: bytes of what else autograd saves, by layer.
        left: bytes of outputs of operators that first runs have left, by layer.
    """

    storages: set[int]
    graphs: dict[int, int]
    left: dict[int, int]
