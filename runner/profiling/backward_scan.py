"""Measures a layer as it runs inside a stage: its backward when other layers follow, and its recomputed forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker

__all__ = ["as_leaf", "chained_backward_bytes", "later", "stopped_forward_bytes"]


def as_leaf(tensor: Tensor) -> Tensor:
    """The tensor as the next layer receives it when it is measured alone: the same memory, detached from the graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def chained_backward_bytes(function: Callable[[Any], Any], value: Any, tracker: LiveTracker) -> int:
    """Run ``function`` forward and backward; return its peak bytes above its saved tensors and output gradient.

    Args:
        function: a layer or loss; the gradients of its weights are allocated already.
        value: its input: tensors in containers.
        tracker: active; its peak is reset.
    """
    output = function(enter_graph(map_tensors(as_leaf, value)))
    roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
    if not roots:
        return 0
    gradient_bytes = sum(root.numel() * root.element_size() for root in roots)
    ends = [later(root) for root in roots]
    del output, roots
    before = tracker.live + gradient_bytes
    tracker.reset_peak()
    torch.autograd.backward(ends, [torch.empty_like(end) for end in ends])
    return max(0, tracker.peak - before)


def stopped_forward_bytes(function: Callable[[Any], Any], value: Any, tracker: LiveTracker) -> int:
    """Run ``function`` forward; return its peak bytes until autograd has saved the last tensor.

    The peak counts from what was alive before the call.

    Args:
        function, value, tracker: see :func:`chained_backward_bytes`.
    """
    before, seen = tracker.live, 0
    tracker.reset_peak()

    def note(tensor: Tensor) -> Tensor:
        nonlocal seen
        seen = tracker.peak - before
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(enter_graph(map_tensors(as_leaf, value)))
    return seen


class _Later(torch.autograd.Function):
    """Takes the place of the layers that follow: saves nothing, and makes a gradient that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.like = {"size": output.shape, "dtype": output.dtype, "device": output.device}
        return output.new_empty(0)

    @staticmethod
    def backward(ctx: Any, nothing: Tensor) -> Tensor:
        return torch.ones(**ctx.like)


def later(output: Tensor) -> Tensor:
    """What stands for the end of the layers that follow an output; a backward begins there."""
    end: Tensor = _Later.apply(output)  # type: ignore[no-untyped-call]  # torch's own
    return end
