"""Seconds and bytes of the fills of a stage, by their kinds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations

from runner.profile import FillProfile, LayerProfile

__all__ = ["FillRanges", "StageFills"]


@dataclass(frozen=True, slots=True)
class StageFills:
    """Figures of the fills of one stage and one micro-batch, by the names of their kinds.

    Args:
        of_microbatch: whether fills of the kind are done for each micro-batch; otherwise once for a stage.
        seconds: seconds of one fill.
        kept_bytes: bytes of the tensors that one micro-batch leaves to one fill.
        peak_bytes: largest number of temporary bytes while one fill runs.
        backward_bytes: for a set of kinds, the largest increase during a backward that leaves tensors to fills of these
            kinds, over what was alive at its start.
    """

    of_microbatch: Mapping[str, bool] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    kept_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    backward_bytes: Mapping[frozenset[str], int] = field(default_factory=dict)


class FillRanges:
    """Gives the figures of the fills of any contiguous range of layers.

    Args:
        chain: the layers and the loss.
        saved: prefix sums of the bytes that autograd keeps of them.
    """

    def __init__(self, chain: Sequence[LayerProfile], saved: Sequence[int]) -> None:
        self._chain, self._saved = chain, saved
        self._kinds = {fill.kind: fill.of_microbatch for layer in chain for fill in layer.fills}
        self._seconds = {kind: self._sums(kind, lambda fill: fill.seconds) for kind in self._kinds}
        self._kept = {kind: self._sums(kind, lambda fill: float(fill.kept_bytes)) for kind in self._kinds}

    def of(self, first: int, end: int, held_output_bytes: int) -> StageFills:
        """The figures of a stage with the layers from ``first`` to ``end - 1``.

        Args:
            first: the stage's first layer.
            end: the layer after the stage's last one.
            held_output_bytes: the bytes of their output that ``saved`` counts and a backward does not free.
        """
        if not self._kinds:
            return StageFills()
        fills = [fill for layer in self._chain[first:end] for fill in layer.fills]
        left_to = [kind for kind, of_microbatch in self._kinds.items() if of_microbatch]
        return StageFills(
            of_microbatch=self._kinds,
            seconds={kind: sums[end] - sums[first] for kind, sums in self._seconds.items()},
            kept_bytes={kind: round(sums[end] - sums[first]) for kind, sums in self._kept.items()},
            peak_bytes={
                kind: max((fill.peak_bytes for fill in fills if fill.kind == kind), default=0) for kind in self._kinds
            },
            backward_bytes={
                frozenset(kinds): self._backward(first, end, held_output_bytes, kinds) for kinds in _subsets(left_to)
            },
        )

    def _backward(self, first: int, end: int, held_output_bytes: int, kinds: Collection[str]) -> int:
        """The peak of a stage's backward, which runs the layers from the last to the first, if fills follow.

        The tensors that are left to fills of ``kinds`` stay when autograd drops its own. For the layer that runs, they
        are mostly contained in its transient bytes, and are not counted again.
        """
        peak, kept = 0.0, 0.0
        for at in range(end - 1, first - 1, -1):
            layer = self._chain[at]
            if at == end - 1:
                own = layer.backward_transient_bytes
            else:
                own = layer.gradient_of_output_bytes + layer.inner_backward_bytes + held_output_bytes
            peak = max(peak, kept + own - (self._saved[end] - self._saved[at + 1]))
            kept += sum(fill.kept_bytes for fill in layer.fills if fill.kind in kinds)
        return round(peak)

    def _sums(self, kind: str, figure: Callable[[FillProfile], float]) -> list[float]:
        """The prefix sums over the layers of a figure of the fills of one kind."""
        of_layers = (sum(figure(fill) for fill in layer.fills if fill.kind == kind) for layer in self._chain)
        return list(accumulate(of_layers, initial=0.0))


def _subsets(kinds: Sequence[str]) -> list[tuple[str, ...]]:
    """All subsets except the empty one; there are only few kinds."""
    return [subset for count in range(1, len(kinds) + 1) for subset in combinations(kinds, count)]
