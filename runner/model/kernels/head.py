"""The last linear map of a model and its cross-entropy as one operator, which makes the logits chunk by chunk.

In training, the last layer gives what the map is given, its weight and its bias in place of the logits. Everything
else, such as a validation with its metrics, gets logits as ever.

Source: ``torch.nn.functional.linear_cross_entropy``. Its forward computes the gradients, and its backward only scales
them: so the gradient of the weight cannot wait, where a schedule splits the backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from runner.config.schema import LossConfig, RunConfig
from runner.model.data import LossFunction
from runner.model.sharded.graph import arguments, operator
from runner.model.traced.operators import Program

__all__ = ["head_of", "loss_of_heads", "why_no_fused_loss"]

_FORMATS = ("fp32", "fp64")
_IGNORED = -100  # torch's own
_PLAIN = ("runner.zoo.losses:cross_entropy", "runner.zoo.losses:token_cross_entropy")


def why_no_fused_loss(config: RunConfig, *, own_loss: bool) -> str:
    """Why torch has no operator for a request's loss; empty if it has one.

    Args:
        config: the request.
        own_loss: whether the model brings its loss.
    """
    if not hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return "This torch has no linear_cross_entropy that makes logits by chunks"
    if own_loss or config.loss.target not in _PLAIN or not set(config.loss.kwargs) <= {"ignore_index"}:
        return "Torch has one for a cross-entropy whose classes all count alike, loss=cross_entropy"
    if config.precision.name not in _FORMATS:
        return f"Losses are computed in fp32, and the map's weight is in {config.precision.name}"
    return ""


def head_of(program: Program) -> Program | None:
    """The program of a last layer that leaves its last operator, a linear map, to the loss; None if it has none."""
    (last,) = program.outputs if len(program.outputs) == 1 else (None,)
    if not isinstance(last, Node) or last.op != "call_function" or operator(last) != "aten::linear":
        return None
    given = arguments(last)
    operands = [each for each in (given["input"], given["weight"], given["bias"]) if each is not None]
    users = [user for user in last.users if user in program.nodes]
    if users or given["weight"] not in program.weights or given["input"].meta["val"].dim() < 2:
        return None
    nodes = tuple(node for node in program.nodes if node is not last)
    _, spec = pytree.tree_flatten(tuple(operands))
    return replace(program, nodes=nodes, outputs=tuple(operands), output_spec=spec)


def loss_of_heads(loss: LossFunction, config: LossConfig, *, by_liger: bool = False) -> LossFunction:
    """A loss that takes what :func:`head_of` gives, too.

    Args:
        loss: takes logits.
        config: says what it is.
        by_liger: whether Liger computes it, but of fake tensors.
    """
    ignored = config.kwargs.get("ignore_index", _IGNORED)

    def of_heads(output: Any, target: Any) -> Any:
        if not isinstance(output, tuple):
            return loss(output, target)
        value, weight, *bias = output
        if target.is_floating_point():  # probabilities of classes, for which torch has no such operator
            return loss(functional.linear(value, weight, *bias), target)
        flat: Tensor = target.flatten()
        if by_liger and detect_fake_mode((value,)) is None:
            from runner.model.kernels.liger import liger_loss

            total = liger_loss(value.flatten(0, -2), weight, bias[0] if bias else None, flat, ignored)
            return total, torch.count_nonzero(flat != ignored)
        total = functional.linear_cross_entropy(
            value.flatten(0, -2),
            weight,
            flat,
            linear_bias=bias[0] if bias else None,
            reduction="sum",
            ignore_index=ignored,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
        return total, torch.count_nonzero(flat != ignored)

    return of_heads
