"""Gradients of weights that several layers of a stage share: each waits in autograd until all of them have added to it.

The last of the layers runs backward first and makes it; it goes when the first of them has run backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from runner.memory.solve.undivided import BackwardPeaks, undivided_peaks
from runner.profile import LayerProfile, SharedWeight, SplitBackward

__all__ = ["SharedGradients"]


class SharedGradients:
    """The bytes that wait while a stage runs backward, by layer, counted from the stage's first.

    Args:
        count: the number of the stage's rows: its layers, and the loss if the stage is the last.
        shared: the weights that several layers of the model share.
        first: index of the stage's first layer in the whole model.

    Attributes:
        any: whether a layer of the stage uses a weight that another layer of the model uses, too.
    """

    def __init__(self, count: int, shared: Sequence[SharedWeight], first: int) -> None:
        self._users: list[tuple[list[int], int]] = []  # of each weight in the stage, with the bytes of its gradient
        self._left = [0] * count  # what the backward of a layer leaves waiting, less what it takes away
        self._again = [0] * count  # gradients of a layer to which a later layer's are added
        self._made = [0] * count  # gradients of a layer to which no later layer's, but an earlier one's are added
        self._largest = [0] * count  # of these two, the largest one
        self.any = False
        for weight in shared:
            users = sorted(layer - first for layer in weight.layers if 0 <= layer - first < count)
            self.any |= bool(users)
            if len(users) > 1:
                self._users.append((users, weight.gradient_bytes))
                self._left[users[-1]] += weight.gradient_bytes
                self._left[users[0]] -= weight.gradient_bytes
                self._made[users[-1]] += weight.gradient_bytes
                for user in users:
                    self._again[user] += weight.gradient_bytes if user != users[-1] else 0
                    self._largest[user] = max(self._largest[user], weight.gradient_bytes)

    def left_by(self, at: int) -> int:
        """What the backward of a layer leaves waiting, less what it takes away."""
        return self._left[at]

    def behind(self, at: int) -> int:
        """What waits while a layer runs backward: what the layers behind it have left."""
        return sum(self._left[at + 1 :])

    def row(self, at: int, layer: LayerProfile) -> LayerProfile:
        """A layer's row, in whose peaks the gradients of shared weights wait, or are added to those that wait.

        The sum with what waits is a further tensor for a moment. Where a layer adds to gradients, the peaks are bounds.
        """
        if layer.gradient_peaks is None or not self._largest[at]:
            return layer
        if not self._again[at]:
            alone, chained, *_ = undivided_peaks(layer)  # B keeps gradients, too
            of_i = layer.split
        else:
            summing = layer.gradient_peaks.chained_adding + self._largest[at] + self._made[at]
            chained = max(layer.inner_backward_bytes, summing)
            alone = max(layer.backward_transient_bytes, chained)
            of_i = self._adding(at, layer)
        return replace(
            layer.with_backward(alone, chained),
            split=None if of_i is None else replace(of_i, made_bytes=max(of_i.made_bytes, 2 * self._largest[at])),
        )

    def shared_with(self, others: Collection[int]) -> list[int]:
        """For each layer, the gradients of its weights that any of some other layers shares."""
        found = [0] * len(self._left)
        for users, num_bytes in self._users:
            if any(user in others for user in users):
                for user in users:
                    found[user] += num_bytes
        return found

    def own(self, at: int, layer: LayerProfile) -> int:
        """The gradients of a layer's weights that are not added to what waits already."""
        return max(0, layer.gradient_bytes - self._again[at])

    def undivided(self, at: int, layer: LayerProfile) -> BackwardPeaks:
        """The peaks of an I that makes the gradients of all weights of a layer; ``layer``: its row without sharing."""
        return undivided_peaks(self.row(at, layer) if self._again[at] else layer, self.own(at, layer))

    def _adding(self, at: int, layer: LayerProfile) -> SplitBackward | None:
        """The figures of I of a layer that adds to gradients that wait already; any of its weights may be shared."""
        split = layer.split
        return None if split is None else split.with_more(min(split.waiting_bytes, self._largest[at]))
