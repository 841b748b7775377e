"""Predicts the peak memory of a segment's backward: its second run forward, and the backward that uses that run.

Two things exist when its backward begins, and are not counted: what the segment has kept from its first run (its input,
and what a selective policy keeps), and the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from runner.memory.solve.program import second_run
from runner.memory.solve.tensors import StageTensors
from runner.memory.solve.undivided import BackwardPeaks
from runner.memory.solve.values import Segment
from runner.profile import LayerProfile, Recomputation

__all__ = ["SecondRun", "dropping_forward_bytes", "keeps_what_changes", "recomputation"]


def recomputation(layer: LayerProfile, save_ops: str | None) -> Recomputation:
    """What a layer keeps, and what its second forward makes again; if it is not known: nothing, and everything."""
    return layer.recomputation.get(save_ops or "", Recomputation(0, layer.saved_bytes, layer.forward_flops))


def keeps_what_changes(layers: Sequence[LayerProfile], at: int, save_ops: str) -> bool:
    """Whether outputs of operators that layer ``at`` keeps are changed in place, by it or by a layer behind it."""
    figures = recomputation(layers[at], save_ops)
    own = {tensor.storage for tensor in layers[at].output} if figures.keeps_output else set[int]()
    return figures.changes_kept or any(own.intersection(later.writes) for later in layers[at + 1 :])


def dropping_forward_bytes(layer: LayerProfile, figures: Recomputation) -> int:
    """Peak bytes of a layer's forward that drops what it saves, except what a selective policy keeps."""
    ordinary = layer.saved_bytes + layer.forward_transient_bytes
    if layer.unsaved_forward_bytes is None:
        return ordinary
    return min(ordinary, layer.unsaved_forward_bytes + figures.kept_bytes)


@dataclass
class _Walk:
    """The state of a walk through one second run.

    Args:
        given: storages that exist without this run, or that it keeps already.
        known_gradient: bytes of the gradient of its output, whose place gradients of earlier tensors may take.
        end: its last layer, counted from the stage's first.
        made: bytes that it keeps so far.
        peak: the largest sum so far. A layer's backward is counted together with its forward, because the layers
            behind it run backward first and have then freed their tensors.
    """

    given: set[int]
    known_gradient: int
    end: int
    made: int = 0
    peak: int = 0

    def reach(self, num_bytes: int) -> None:
        """Note that so many bytes are alive at once."""
        self.peak = max(self.peak, num_bytes)


class SecondRun:
    """Predicts the peak memory of the backwards of segments.

    Args:
        chain: the stage's layers, and the loss if the stage is the last.
        tensors: the tensors between them.
        first: index of the stage's first layer in the whole model.
        peaks: the peaks of each layer's backward, of B or of I.
    """

    def __init__(
        self,
        chain: Sequence[LayerProfile],
        tensors: StageTensors,
        first: int,
        peaks: Sequence[BackwardPeaks],
    ) -> None:
        self._chain = chain
        self._peaks = peaks
        self._waiting = list(accumulate((each.waiting for each in self._peaks), initial=0))
        self._tensors = tensors
        self._first = first

    def peak(self, segment: Segment) -> int:
        """Peak bytes of the backward of a segment that is computed again, including the segments inside."""
        start, end = segment.first - self._first, segment.last - self._first
        leaves = self._leaves(end)  # if so, the caller holds the output and its gradient
        known = 0 if leaves else self._own_gradient(end)
        walk = _Walk({*self._tensors.inputs(start)}, known, end)
        program = second_run(segment)
        for part in program:
            if part.recompute:
                self._again(walk, part, is_last=part is program[-1])
                continue
            for layer in range(part.first, part.last + 1):
                if layer == segment.last:
                    self._last(walk, end, segment.save_ops)
                else:
                    self._layer(walk, layer - self._first, segment.save_ops)
        return walk.peak

    def _leaves(self, at: int) -> bool:
        """Whether a layer's output leaves the stage."""
        return at == len(self._chain) - 1

    def _own_gradient(self, at: int) -> int:
        """The gradient of a layer's output, without what the stage's caller holds."""
        return self._chain[at].gradient_of_output_bytes - self._tensors.callers_gradient_bytes(at)

    def _inner(self, at: int) -> int:
        """The peak of the backward of a layer that another one follows."""
        return self._peaks[at].beside(self._tensors.callers_used(at))

    def _again(self, walk: _Walk, part: Segment, *, is_last: bool) -> None:
        """Walk through a segment inside, which keeps only its input until its backward; the last one is not run yet."""
        start, end = part.first - self._first, part.last - self._first
        for at in () if is_last else range(start, end + 1):
            running = dropping_forward_bytes(self._chain[at], recomputation(self._chain[at], None))
            walk.reach(walk.made + sum(self._fresh(walk, at).values()) + running)
        kept = self._fresh(walk, start)
        walk.made += sum(kept.values())
        walk.given |= kept.keys()
        own_gradient = 0 if is_last else self._own_gradient(end) - walk.known_gradient
        walk.reach(walk.made + own_gradient + self._left_behind(walk, end) + self.peak(part))

    def _left_behind(self, walk: _Walk, at: int) -> int:
        """The gradients of weights that the run's layers after this one have made, and that still wait."""
        return self._waiting[walk.end + 1] - self._waiting[at + 1]

    def _fresh(self, walk: _Walk, at: int) -> dict[int, int]:
        """The storages of a layer's input that only this run has made, and does not keep so far."""
        inputs = self._tensors.inputs(at)
        return {storage: size for storage, size in inputs.items() if storage not in walk.given}

    def _take_input(self, walk: _Walk, at: int) -> int:
        """Keep what autograd saves of a layer's input; return the bytes of the rest, which wait while it runs."""
        saves, fresh = self._tensors.saves(at), self._fresh(walk, at)
        walk.made += sum(size for storage, size in fresh.items() if storage in saves)
        walk.given |= saves
        return sum(size for storage, size in fresh.items() if storage not in saves)

    def _layer(self, walk: _Walk, at: int, save_ops: str | None) -> None:
        """Walk through a layer that keeps its graph and is not the last."""
        layer, figures = self._chain[at], recomputation(self._chain[at], save_ops)
        waiting = self._take_input(walk, at)
        walk.reach(walk.made + waiting + layer.saved_bytes + layer.forward_transient_bytes - figures.kept_bytes)
        walk.made += figures.recomputed_bytes
        own_gradient = self._own_gradient(at) - walk.known_gradient
        walk.reach(walk.made + own_gradient + self._left_behind(walk, at) + self._inner(at))

    def _last(self, walk: _Walk, at: int, save_ops: str | None) -> None:
        """Walk through the last layer: the run stops when it has what the backward needs, and the backward goes on.

        The backward has begun before: the run waits until it asks for the first saved tensor. Its peak is at most that
        of a whole forward.
        """
        layer, figures = self._chain[at], recomputation(self._chain[at], save_ops)
        waiting = self._take_input(walk, at)
        done = figures.recomputed_bytes - figures.released_bytes
        running = max(done, layer.saved_bytes + layer.forward_transient_bytes - figures.kept_bytes)
        walk.reach(walk.made + waiting + running + layer.asking_bytes)
        backward = self._last_backward(at) if self._leaves(at) else self._inner(at)
        walk.reach(walk.made + done + backward)

    def _last_backward(self, at: int) -> int:
        """Peak bytes of the backward of a stage's last layer; the caller has its gradient but not its second output."""
        peaks, saves = self._peaks[at], self._tensors.saves(at)
        second_output = sum(size for storage, size in self._tensors.made(at).items() if storage in saves)
        if peaks.chained is None:
            return peaks.alone
        return max(peaks.chained, peaks.alone - second_output)
