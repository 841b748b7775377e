"""Losses, computed in fp32: means over samples, or over those tokens that are to be learned."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy", "mse", "token_cross_entropy"]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over all tokens of the cross-entropy in nats; output [..., classes], target [...] of class ids."""
    return functional.cross_entropy(output.flatten(0, -2).float(), target.flatten())


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Mean of the squared differences over all elements."""
    return functional.mse_loss(output.float(), target.float())


def token_cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over tokens of the cross-entropy in nats, and the number of tokens; targets of -100 do not count.

    So every token has the same weight, however tokens are put into rows, micro-batches and replicas.

    Args:
        output: logits [..., classes].
        target: ids [...].
    """
    flat = target.flatten()
    losses = functional.cross_entropy(output.flatten(0, -2).float(), flat, ignore_index=-100, reduction="sum")
    return losses, torch.count_nonzero(flat != -100)
