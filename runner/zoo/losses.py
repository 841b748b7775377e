"""Losses that are plain means over their samples, computed in fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy", "mse"]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens of the cross-entropy in nats; output [..., classes], target [...] of class ids."""
    return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean of the squared differences over all elements."""
    return functional.mse_loss(output.float(), target.float())
