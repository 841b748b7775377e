"""Measures what the split backward of a layer leaves to W, the gradient of its weights, and what stays in I."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.model.split.backward import PendingWeights, backward_input, backward_weight
from runner.model.split.graph import Graph
from runner.model.split.reasons import kept_in_input, waiting_weights
from runner.profile import SplitBackward
from runner.profiling.backward_scan import handed_peaks, scan_backward
from runner.profiling.flops import FlopCounter

__all__ = ["split_figures"]


def split_figures(
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    module: nn.Module | None = None,
    backward_flops: float = 0.0,
    own: Mapping[int, int] = MappingProxyType({}),
    numbers: StorageNumbers | None = None,
    shared: Sequence[Tensor] = (),
) -> SplitBackward:
    """Run ``function`` forward, then I (the input gradient); the gradients of weights must be allocated already.

    Args:
        function: a layer or loss.
        value: its input: tensors in containers; copies of them are made and dropped.
        tracker: active; its peak is reset.
        module: names the weights that ``function`` uses.
        backward_flops: FLOPs of a whole backward.
        own: the tensors that may leave the stage, see :func:`runner.profiling.backward_scan.handed_peaks`.
        numbers: gives the storages of the input their numbers; None: they are not told.
        shared: the weights that other layers use, too.
    """
    base = tracker.live
    given = map_tensors(_copied, value)
    roots = [tensor for tensor in flatten(function(enter_graph(given)))[0] if tensor.requires_grad]
    gradients = [torch.ones_like(root) for root in roots]
    number, leaves = len(roots), [tensor for tensor in flatten(given)[0] if tensor.requires_grad]
    kept, waiting = kept_in_input(roots, leaves), waiting_weights(roots, leaves)
    before = tracker.live
    tracker.reset_peak()
    with FlopCounter() as flops:
        made, pending = backward_input(roots, gradients, leaves)
    transient = tracker.peak - before
    del roots, made, leaves
    needed_gradient = sum(_still_needed(gradients, tracker))
    copies = flatten(given)[0]
    del given
    needed = _still_needed(copies, tracker)
    needed_input, left = sum(needed), tracker.live
    made_bytes = _made_by(pending, tracker)
    del pending
    deferred = left - base - needed_gradient - needed_input
    alone = scan_backward(_everything, function, value, tracker, handed=range(number), asks=True)
    chained = scan_backward(_everything, function, value, tracker, asks=True)
    followed = beside = scan_backward(_input_alone, function, value, tracker)
    if followed.output_is_there:  # else nothing changes if it is kept
        beside = scan_backward(_input_alone, function, value, tracker, keeps_output=True)
    figures = SplitBackward(
        deferred,
        needed_input,
        needed_gradient,
        transient,
        waiting_bytes=sum(weight.nbytes for weight in waiting),
        waiting_shared_bytes=sum(weight.nbytes for weight in waiting if any(weight is each for each in shared)),
        inputs=_storages_of(value, needed, numbers) if numbers is not None else None,
        chained_transient_bytes=followed.peak,
        beside_output_bytes=beside.peak,
        undivided_bytes=alone.peak,
        chained_undivided_bytes=chained.peak,
        handed_bytes=handed_peaks(_input_alone, function, value, tracker, own, keeps_output=True),
        handed_undivided_bytes=handed_peaks(_everything, function, value, tracker, own),
        asking_bytes=alone.asking,
        made_bytes=made_bytes,
        chained_asking_bytes=chained.asking,
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


def _input_alone(roots: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> Any:
    """I of a layer whose weights can wait."""
    return backward_input(roots, gradients, leaves)


def _everything(roots: list[Tensor], gradients: list[Tensor], leaves: list[Tensor]) -> Any:
    """I of a layer whose weights cannot wait: their gradients are alive until it has ended."""
    graph, given = Graph(roots), {id(leaf) for leaf in leaves}
    if graph.is_reentrant:
        torch.autograd.backward(roots, gradients)  # it adds each gradient at once
        return ()
    weights = [node.variable for node in graph.leaves if id(node.variable) not in given]
    wanted = [*leaves, *weights]
    return torch.autograd.grad(roots, wanted, gradients, allow_unused=True) if wanted else ()


def _flops_for_input(function: Callable[[Any], Any], value: Any) -> float:
    """FLOPs of the gradient of the input alone."""
    given = map_tensors(_copied, value)
    roots = [tensor for tensor in flatten(function(enter_graph(given)))[0] if tensor.requires_grad]
    leaves = [tensor for tensor in flatten(given)[0] if tensor.requires_grad]
    with FlopCounter() as flops:
        torch.autograd.grad(roots, leaves, [torch.ones_like(root) for root in roots], allow_unused=True)
    return float(flops.total)


def _still_needed(tensors: list[Tensor], tracker: LiveTracker) -> list[int]:
    """Empty the list; return for each of its tensors the bytes that are alive nevertheless."""
    needed = []
    while tensors:
        num_bytes, before = tensors[-1].untyped_storage().nbytes(), tracker.live
        tensors.pop()
        needed.append(num_bytes - (before - tracker.live))
    return needed[::-1]


def _storages_of(value: Any, needed: list[int], numbers: StorageNumbers) -> tuple[int, ...]:
    """The storages of the tensors of an input of which any bytes are needed."""
    found = {numbers.of(tensor) for tensor, num_bytes in zip(flatten(value)[0], needed, strict=True) if num_bytes}
    return tuple(sorted(found))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
