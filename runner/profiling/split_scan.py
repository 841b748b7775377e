"""Measures what the split backward of a layer leaves to W, the gradient of its weights, and what stays in I."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker
from runner.model.split.backward import PendingWeights, backward_input, backward_weight
from runner.model.split.reasons import kept_in_input, waiting_weights
from runner.profile import SplitBackward
from runner.profiling.backward_scan import chained_backward
from runner.profiling.flops import FlopCounter

__all__ = ["split_figures"]


def split_figures(
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    module: nn.Module | None = None,
    backward_flops: float = 0.0,
) -> SplitBackward:
    """Run ``function`` forward, then I (the input gradient); the gradients of weights must be allocated already.

    Args:
        function: a layer or loss.
        value: its input: tensors in containers; copies of them are made and dropped.
        tracker: active; its peak is reset.
        module: names the weights that ``function`` uses.
        backward_flops: FLOPs of a whole backward.
    """
    base = tracker.live
    given = map_tensors(_copied, value)
    roots = [tensor for tensor in flatten(function(enter_graph(given)))[0] if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    leaves = [tensor for tensor in flatten(given)[0] if tensor.requires_grad]
    kept, waiting = kept_in_input(roots, leaves), waiting_weights(roots, leaves)
    before = tracker.live
    tracker.reset_peak()
    with FlopCounter() as flops:
        made, pending = backward_input(roots, gradients, leaves)
    transient = tracker.peak - before
    del roots, made, leaves
    needed_gradient = _still_needed(gradients, tracker)
    copies = flatten(given)[0]
    del given
    needed_input = _still_needed(copies, tracker)
    left = tracker.live
    made_bytes = _made_by(pending, tracker)
    del pending
    deferred = left - base - needed_gradient - needed_input
    chained = chained_backward(function, value, tracker, of_input=backward_input)
    figures = SplitBackward(
        deferred,
        needed_input,
        needed_gradient,
        transient,
        waiting_bytes=sum(weight.nbytes for weight in waiting),
        chained_transient_bytes=chained.peak,
        made_bytes=made_bytes,
    )
    if not kept or module is None:
        return figures
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    figures = replace(
        figures,
        kept=tuple((names.get(id(each.weight), "a weight"), each.reason) for each in kept),
        kept_in_one_piece=any(each.in_one_piece for each in kept),
    )
    return figures.with_kept_share(backward_flops, flops.total, _flops_for_input(function, value))


def _made_by(pending: PendingWeights, tracker: LiveTracker) -> int:
    """Run W; return the largest increase over what was alive at its start."""
    before = tracker.live
    tracker.reset_peak()
    backward_weight(pending)
    return tracker.peak - before


def _flops_for_input(function: Callable[[Any], Any], value: Any) -> float:
    """FLOPs of the gradient of the input alone."""
    given = map_tensors(_copied, value)
    roots = [tensor for tensor in flatten(function(enter_graph(given)))[0] if tensor.requires_grad]
    leaves = [tensor for tensor in flatten(given)[0] if tensor.requires_grad]
    with FlopCounter() as flops:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return float(flops.total)


def _still_needed(tensors: list[Tensor], tracker: LiveTracker) -> int:
    """Empty the list; return the bytes of its tensors that are alive nevertheless."""
    needed = 0
    while tensors:
        num_bytes, before = tensors[-1].untyped_storage().nbytes(), tracker.live
        tensors.pop()
        needed += num_bytes - (before - tracker.live)
    return needed


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
