"""Gradients of weights that several layers of a stage share: each waits in autograd until all of them have added to it.

The last of the layers runs backward first and makes it; it goes when the first of them has run backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from runner.profile import LayerProfile, SharedWeight, SplitBackward

__all__ = ["SharedGradients"]


class SharedGradients:
    """The bytes that wait while a stage runs backward, by layer, counted from the stage's first.

    Args:
        count: the number of the stage's rows: its layers, and the loss if the stage is the last.
        shared: the weights that several layers of the model share.
        first: index of the stage's first layer in the whole model.
    """

    def __init__(self, count: int, shared: Sequence[SharedWeight], first: int) -> None:
        self._users: list[tuple[list[int], int]] = []  # of each weight in the stage, with the bytes of its gradient
        self._left = [0] * count  # what the backward of a layer leaves waiting, less what it takes away
        self._again = [0] * count  # gradients of a layer to which a later layer's are added
        self._made = [0] * count  # gradients of a layer to which no later layer's, but an earlier one's are added
        self._largest = [0] * count  # of these two, the largest one
        self._alone = [0] * count  # gradients of a layer whose weights only other stages share
        for weight in shared:
            users = sorted(layer - first for layer in weight.layers if 0 <= layer - first < count)
            if len(users) == 1:
                self._alone[users[0]] += weight.gradient_bytes
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

        Where a layer makes some and adds to others, the peaks are bounds.
        """
        peaks = layer.shared_peaks
        if peaks is None or not self._largest[at]:
            return layer
        if not self._again[at]:
            alone, chained, of_i = peaks.last_alone, peaks.last, layer.split
        else:
            chained = peaks.between + self._made[at]
            alone = max(layer.backward_transient_bytes, chained)
            of_i = self._adding(at, layer, chained)
        made = layer.backward_made_bytes
        return replace(
            layer.with_backward(alone, chained),
            handed_backward_bytes=(),  # they are measured without other users of the weights
            backward_made_bytes=None if made is None else made + max(0, chained - layer.inner_backward_bytes),
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

    def _adding(self, at: int, layer: LayerProfile, peak: int) -> SplitBackward | None:
        """The figures of I of a layer that adds to gradients that wait already; ``peak``: that of its B."""
        split = layer.split
        if split is None:
            return None
        undivided = peak + layer.gradient_bytes - self._again[at] - self._made[at]
        # Which of its weights wait is not known: so much, at least, is added to what waits already.
        added = max(0, split.waiting_shared_bytes - self._made[at] - self._alone[at])
        beside = min(split.waiting_shared_bytes, self._largest[at])
        return replace(
            split.with_more(beside),
            waiting_bytes=split.waiting_bytes - added,
            handed_bytes=(),
            handed_undivided_bytes=(),
            undivided_bytes=undivided,
            chained_undivided_bytes=undivided,
        )
