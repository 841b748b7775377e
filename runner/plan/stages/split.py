"""The bytes that I leaves to W in a stage, and the peak while I runs."""

from __future__ import annotations

from collections.abc import Sequence

from runner.plan.stages.ranges import RangeMaximum, prefix
from runner.profile import LayerProfile, SplitBackward

__all__ = ["SplitRanges"]


class SplitRanges:
    """Gives the figures of the split backward of any contiguous range of layers.

    Args:
        chain: the model's layers and the loss.
        saved: prefix sums of their saved bytes.
    """

    def __init__(self, chain: Sequence[LayerProfile], saved: Sequence[int]) -> None:
        split = [_split(layer) for layer in chain]
        self._saved = saved
        self._callers = [each.gradient_bytes + each.held_bytes for each in split]
        self._inputs = [each.input_bytes for each in split]
        self._transients = [each.transient_bytes for each in split]
        self._kept = prefix(each.deferred_bytes + each.gradient_bytes for each in split)
        self._kept_inputs = prefix(self._inputs)
        self._waiting = prefix(each.waiting_bytes for each in split)
        # While layer k runs, the later layers have left the tensors that W needs, and the gradients that wait for the
        # end of I. The input of layer k + 1 still counts as saved, except for what layer k + 1 or a later one counts.
        last = len(chain)
        self._running = RangeMaximum(
            [
                saved[at + 1] + layer.gradient_of_output_bytes + each.inner_bytes
                - self._kept[at + 1] - self._kept_inputs[min(at + 2, last)] - self._waiting[at + 1]
                + min(layer.pending_output_bytes, self._inputs[min(at + 1, last - 1)])
                for at, (layer, each) in enumerate(zip(chain, split, strict=True))
            ]
        )  # fmt: skip

    def of_input(self, first: int) -> int:
        """The bytes of a layer's input that W needs."""
        return self._inputs[first]

    def deferred(self, first: int, end: int) -> int:
        """The bytes that W needs of the layers from ``first`` to ``end - 1``, without the input of the first one."""
        inputs = self._kept_inputs[end] - self._kept_inputs[first + 1]
        return self._kept[end] - self._kept[first] + inputs

    def callers(self, end: int) -> int:
        """The part of :meth:`deferred` that the caller of I holds besides, of a stage that ends before ``end``."""
        return self._callers[end - 1]

    def peak(self, first: int, end: int, held_output_bytes: int) -> int:
        """The largest increase during I over what was alive at its start.

        As in a full backward, the caller holds the stage's output and its gradient, also if W needs them; of the last
        stage, the gradient of the loss.
        """
        peak = self._transients[end - 1]
        if end - 1 > first:
            peak = max(peak, self._running.over(first, end - 1) + self._behind(end) + held_output_bytes)
        return max(peak, 0)

    def peak_of_layer(self, at: int, end: int, held_output_bytes: int) -> int:
        """The largest increase while the I of one layer of the stage runs; see :meth:`peak`."""
        if at == end - 1:
            return self._transients[at]
        return self._running.over(at, at + 1) + self._behind(end) + held_output_bytes

    def _behind(self, end: int) -> int:
        """What is added to the running bytes of a layer of a stage that ends before ``end``."""
        kept = self._kept[end] + self._kept_inputs[end] + self._waiting[end] - self.callers(end)
        return kept - self._saved[end]


def _split(layer: LayerProfile) -> SplitBackward:
    """The figures of a layer's split backward; if they are not known, W needs everything that was saved."""
    return layer.split or SplitBackward(layer.saved_bytes, 0, 0, layer.backward_transient_bytes)
