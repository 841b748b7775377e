"""Losses, in fp32 or wider, as ``(sum, weight)``: the weight counts what the mean over a whole batch divides by.

So every token, element or class weight counts the same, however a batch is cut into micro-batches and replicas, and a
micro-batch in which nothing counts is no 0 / 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["cross_entropy", "mse", "token_cross_entropy"]


def cross_entropy(
    output: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    class_weights: Sequence[float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy in nats, and what torch's mean divides it by.

    The weight is the number of targets that count or, with class weights, the sum of their classes' weights; of
    probabilities it is the number of rows.

    Args:
        output: logits [..., classes].
        target: ids of classes [...], or probabilities of classes [..., classes].
        ignore_index: targets that do not count.
        label_smoothing: the share of a target that is spread over all classes, from 0 to 1.
        class_weights: one for each class; None: all are 1.

    Raises:
        ValueError: the ids have as many axes as rows of classes, and other sizes, such as (batch, height, width) for
            (batch, classes, height, width).
    """
    logits = _wide(output.flatten(0, -2))
    weights = None if class_weights is None else torch.tensor(class_weights, dtype=logits.dtype, device=logits.device)
    if target.is_floating_point():
        probabilities = target.flatten(0, -2).to(logits.dtype)
        total = functional.cross_entropy(
            logits, probabilities, weights, reduction="sum", label_smoothing=label_smoothing
        )
        return total, torch.tensor(len(logits))
    if target.dim() == output.dim() - 1 and target.shape != output.shape[:-1]:
        why = "of the output without its last axis, which is that of the classes"
        raise ValueError(f"the target's shape {(*target.shape,)} must be that {why}: {(*output.shape[:-1],)}")
    flat = target.flatten()
    total = functional.cross_entropy(
        logits, flat, weights, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    counts = flat != ignore_index
    return total, torch.count_nonzero(counts) if weights is None else weights[flat[counts]].sum()


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def mse(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the squared differences, and the number of elements.

    Raises:
        ValueError: the shapes differ. Torch would compare each output with each target, (n, 1) with (n).
    """
    if output.shape != target.shape:
        raise ValueError(f"the target's shape {(*target.shape,)} must be that of the output, {(*output.shape,)}")
    wide = _wide(output)
    squares = functional.mse_loss(wide, target.to(wide.dtype), reduction="none")
    return squares.sum(), torch.tensor(squares.numel())


def token_cross_entropy(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over tokens of the cross-entropy in nats, and the number of tokens; targets of -100 do not count.

    Args:
        output: logits [..., classes].
        target: ids [...].
    """
    return cross_entropy(output, target)
