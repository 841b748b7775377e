"""Profiles one layer: the bytes that its forward and backward keep and allocate, and their FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runner.memory.solve.save_ops import OPERATORS
from runner.model.boundary import enter_graph, flatten, map_tensors
from runner.model.dense_parts import num_bytes_of
from runner.model.layers import keeps_running_statistics
from runner.model.live_tracker import LiveTracker, StorageNumbers
from runner.optim.states.whole_norms import part_of
from runner.profile import BoundaryTensor, GradientPeaks, LayerProfile, SharedGradient
from runner.profiling.backward_scan import (
    BackwardPeaks,
    BackwardWatch,
    as_leaf,
    chained_backward,
    having_gradients,
)
from runner.profiling.flops import FlopCounter
from runner.profiling.operator_peaks import OperatorPeaks
from runner.profiling.saved_scan import ForwardScan, scan_forward
from runner.profiling.split_scan import split_figures

__all__ = ["boundary_tensors", "num_bytes", "profile_call"]

_MATRIX = 2


def profile_call(
    name: str,
    function: Callable[[Any], Any],
    value: Any,
    tracker: LiveTracker,
    numbers: StorageNumbers,
    module: nn.Module | None = None,
) -> tuple[Any, LayerProfile]:
    """Run ``function`` forward and backward; return its detached output and its row of the profile.

    Args:
        name: name of the row.
        value: its input; any nest of tensors.
        tracker: active.
        numbers: gives the storages of all rows distinct numbers.
        module: the module whose weights and buffers ``function`` uses.
    """
    parameters, buffers = _weights_of(module)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    chained = chained_backward(function, value, tracker, trained)
    given = map_tensors(as_leaf, value)
    scan = scan_forward(lambda taken: function(enter_graph(taken)), given, [*parameters, *buffers], tracker)
    peaks, watch = OperatorPeaks(tracker), BackwardWatch(tracker, trained)
    writes = _WriteWatch(function)
    base = tracker.live
    with FlopCounter() as forward, peaks:
        output = watch.forward(lambda: writes(enter_graph(given)))[0] if scan.hooked else writes(enter_graph(given))
    saved = tracker.live - base
    forward_peak, second_peaks = peaks.peak_bytes, {preset: peaks.second_peak(preset) for preset in OPERATORS}
    kept, numbered = _storages(scan, given, output, numbers)
    roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
    parts = _SharedGradients(flatten(given)[0], numbers)
    alone, backward = _backward(roots, tracker, watch)
    with having_gradients(trained):
        row = LayerProfile(
            name=name,
            **_weight_figures(parameters, buffers),
            saved_bytes=saved,
            output_bytes=num_bytes(output),
            forward_transient_bytes=max(0, forward_peak - saved),
            backward_transient_bytes=alone.peak,
            forward_flops=forward.total,
            backward_flops=backward.total,
            forward_exchanges=forward.exchanges(),
            backward_exchanges=backward.exchanges(),
            draws_apart=forward.draws_apart,
            forward_seconds=0.0,
            backward_seconds=0.0,
            saves_input=scan.saves_input,
            saves_output=scan.saves_output,
            unsaved_forward_bytes=scan.peak_bytes,
            recomputation=scan.recomputation(forward.total, second_peaks.__getitem__, numbered),
            split=split_figures(function, value, tracker, module, backward.total),
            output=boundary_tensors(output, tracker, numbers),
            saves=kept,
            reads=tuple(sorted({numbered[seen] for seen in scan.read})),
            writes=tuple(sorted(set(map(numbers.of, writes.written)))),
            writes_shared=writes.shared,
            shared_gradients=parts.found(),
            output_gradient_bytes=num_bytes(roots),
            chained_backward_bytes=chained.peak,
            gradient_peaks=GradientPeaks(alone.adding, chained.adding, alone.keeping, chained.keeping),
            asking_bytes=max(alone.asking, chained.asking),
            statistics_bytes=sum(map(num_bytes, _running_statistics(module))),
            unreached=watch.unreached,
        )
    return map_tensors(as_leaf, output), row


def _weights_of(module: nn.Module | None) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The parameters and the buffers of a module."""
    return (list(module.parameters()), list(module.buffers())) if module is not None else ([], [])


def _weight_figures(parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> dict[str, Any]:
    """What a row says of a layer's weights, by field."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "weight_bytes": num_bytes(parameters) + num_bytes_of(buffers),
        "gradient_bytes": num_bytes(trained),
        "largest_parameter_bytes": max(map(num_bytes, trained), default=0),
        "trained_shapes": tuple(tuple(parameter.shape) for parameter in trained),
        "elsewhere_bytes": max(map(_elsewhere_bytes, trained), default=0),
    }


def _elsewhere_bytes(parameter: nn.Parameter) -> int:
    """The bytes of a matrix that other ranks have."""
    part = part_of(parameter)
    return 0 if part is None or parameter.dim() != _MATRIX else (part.degree - 1) * parameter.nbytes


def _storages(
    scan: ForwardScan, given: Any, output: Any, numbers: StorageNumbers
) -> tuple[tuple[int, ...], dict[Any, int]]:
    """The numbers of the storages of its input and output that a forward saves, and of each that the scan was given."""
    inputs = flatten(given)[0]
    tensors = [*inputs, *flatten(output)[0]]
    kept = {numbers.of(t) for t, seen in zip(tensors, scan.given + scan.made, strict=True) if seen in scan.kept}
    return tuple(sorted(kept)), {seen: numbers.of(t) for t, seen in zip(inputs, scan.given, strict=True)}


class _WriteWatch:
    """Calls a function once, and notes which tensors of its input it changes in place.

    Attributes:
        written: these tensors.
        shared: whether another tensor of the input lies in the memory of one of them.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.written: list[Tensor] = []
        self.shared = False

    def __call__(self, value: Any) -> Any:
        tensors = flatten(value)[0]
        before = [tensor._version for tensor in tensors]
        output = self._function(value)
        self.written = [each for each, version in zip(tensors, before, strict=True) if each._version != version]
        memories = [tensor.untyped_storage()._cdata for tensor in tensors]
        self.shared = any(memories.count(each.untyped_storage()._cdata) > 1 for each in self.written)
        return output


class _SharedGradients:
    """Watches which gradients of a layer's input are parts of a larger tensor.

    Args:
        given: the tensors of the input, whose backward has not begun.
        numbers: gives the storages of the input their numbers.
    """

    def __init__(self, given: Sequence[Tensor], numbers: StorageNumbers) -> None:
        self._of_gradient = StorageNumbers()
        self._parts: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # storage, its bytes, those of the part
        for tensor in given:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, numbers.of(tensor)))  # type: ignore[no-untyped-call]

    def _note(self, storage: int, gradient: Tensor) -> None:
        whole, part = gradient.untyped_storage().nbytes(), gradient.numel() * gradient.element_size()
        self._parts[self._of_gradient.of(gradient)].append((storage, whole, part))

    def found(self) -> tuple[SharedGradient, ...]:
        """The shared memory, after the backward."""
        larger = (parts for parts in self._parts.values() if any(whole > part for _, whole, part in parts))
        return tuple(SharedGradient(tuple(storage for storage, _, _ in parts), parts[0][1]) for parts in larger)


def _running_statistics(module: nn.Module | None) -> Iterator[list[Tensor]]:
    """The buffers of each module that keeps averages of its inputs, and counts them."""
    for each in module.modules() if module is not None else ():
        if keeps_running_statistics(each):
            yield list(each.buffers(recurse=False))


def num_bytes(value: Any) -> int:
    """Bytes of all tensors in a nest."""
    return sum(tensor.numel() * tensor.element_size() for tensor in flatten(value)[0])


def _backward(roots: Sequence[Tensor], tracker: LiveTracker, watch: BackwardWatch) -> tuple[BackwardPeaks, FlopCounter]:
    """Return the bytes above what was alive before, and the counter of FLOPs."""
    gradients = [torch.ones_like(root) for root in roots]
    before = tracker.live
    with FlopCounter() as flops:
        peaks = watch.backward(lambda: torch.autograd.backward(roots, gradients) if roots else None, before)
    return peaks, flops


def boundary_tensors(output: Any, tracker: LiveTracker, numbers: StorageNumbers) -> tuple[BoundaryTensor, ...]:
    found: dict[int, BoundaryTensor] = {}
    for tensor in flatten(output)[0]:
        gradient_bytes = tensor.numel() * tensor.element_size() if tensor.requires_grad else 0
        storage = numbers.of(tensor)
        found[storage] = BoundaryTensor(storage, tracker.counted_bytes(tensor), gradient_bytes)
    return tuple(found.values())
