"""Gradients of weights that several layers of a stage share: each waits in autograd until all of them have added to it.

The last of the layers runs backward first and makes it; it goes when the first of them has run backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.profile import LayerProfile, SharedWeight

__all__ = ["SharedGradients"]


class SharedGradients:
    """The bytes that wait while a stage runs backward, by layer, counted from the stage's first.

    Args:
        count: the number of the stage's rows: its layers, and the loss if the stage is the last.
        shared: the weights that several layers of the model share.
        first: index of the stage's first layer in the whole model.
    """

    def __init__(self, count: int, shared: Sequence[SharedWeight], first: int) -> None:
        self._left = [0] * count  # what the backward of a layer leaves waiting, less what it takes away
        self._again = [0] * count  # gradients of a layer to which a later layer's are added
        for weight in shared:
            users = sorted(layer - first for layer in weight.layers if 0 <= layer - first < count)
            if len(users) > 1:
                self._left[users[-1]] += weight.gradient_bytes
                self._left[users[0]] -= weight.gradient_bytes
                for user in users[:-1]:
                    self._again[user] += weight.gradient_bytes

    def left_by(self, at: int) -> int:
        """What the backward of a layer leaves waiting, less what it takes away."""
        return self._left[at]

    def behind(self, at: int) -> int:
        """What waits while a layer runs backward: what the layers behind it have left."""
        return sum(self._left[at + 1 :])

    def own(self, at: int, layer: LayerProfile) -> int:
        """The gradients of a layer's weights that are not added to what waits already."""
        return max(0, layer.gradient_bytes - self._again[at])
