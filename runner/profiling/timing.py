"""Measures the seconds of a model's layers on this machine, each layer alone."""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.config.schema import RunConfig
from runner.model.boundary import enter_graph, flatten, map_tensors, num_samples
from runner.model.data import LossFunction, loss_sum
from runner.model.device import device_type
from runner.model.layers import LayerSource
from runner.model.load import load_model
from runner.model.precision import autocast_of, autocasting, cast_module, dtype_of, for_loss, to_precision
from runner.model.split.backward import backward_input, backward_weight
from runner.model.traced.module_structure import structure_of
from runner.optim.build import measure_step_seconds_per_byte
from runner.optim.catalogue.registry import compression_of, optimizer_of
from runner.optim.compression.timing import compression_seconds
from runner.profile import LayerProfile, ModelProfile, SplitBackward
from runner.profiling.backward_scan import as_leaf
from runner.profiling.busy import Probes
from runner.profiling.contracts import is_torchs_own, repeats
from runner.profiling.fills import TimeFills
from runner.profiling.layer_error import about_layer, about_loss

__all__ = ["can_be_timed", "time_layers", "with_measured_seconds"]

_TIMED_RUNS = 3
_TIMED_ALIKE = 3  # layers of those that are alike
_SECONDS = ("forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradient_seconds")
_MOST_BYTES_TO_TIME = 4 << 30
_MOST_ELEMENTS_TO_COMPRESS = 1 << 24
_MOST_FLOPS_TO_TIME = 2e11  # a few seconds on two CPU cores


def can_be_timed(config: RunConfig, profile: ModelProfile) -> bool:
    """Whether this machine is the one planned for, and the model is small enough to run here."""
    if config.hardware.name != "auto":
        return False
    alike = Counter[Hashable]()
    flops = 0.0  # that it takes to time each kind of layer, and to run the others forward
    for layer in profile.layers:
        kind = layer.num_parameters, layer.saved_bytes, layer.forward_flops, layer.backward_flops
        flops += layer.forward_flops + (layer.backward_flops if alike[kind] < _TIMED_ALIKE else 0.0)
        alike[kind] += 1
    weights = sum(layer.weight_bytes for layer in profile.layers)
    largest = max(layer.saved_bytes for layer in profile.layers)
    return flops <= _MOST_FLOPS_TO_TIME and weights + largest <= _MOST_BYTES_TO_TIME


def with_measured_seconds(config: RunConfig, profile: ModelProfile, inputs: Any, targets: Any) -> ModelProfile:
    """Time every layer alone: forward, backward, and backward in two parts; median of three after a warm-up.

    Raises:
        LayerError: a layer or the loss refuses its input's values, which are real here for the first time.
    """
    device = torch.device(device_type(config))
    dtype = dtype_of(config.precision.name)
    autocast = partial(autocasting, device_type=device.type, autocast=autocast_of(config.precision.name))
    model = load_model(config, shard=0, logits=profile.divided_logits)
    inputs, targets = (map_tensors(lambda t: t.to(device), part) for part in (inputs, targets))
    given = to_precision((inputs, targets) if model.step is not None else inputs, dtype)
    make = optimizer_of(config.optimizer).profiler
    time_fills: TimeFills = tuple if make is None else make().timer(device, partial(_now, device))
    probes = Probes()
    with _threads(config.trainer.threads):
        with_targets = (given, targets)
        timed = time_layers(
            profile, model.layers, with_targets, model.loss, dtype=dtype, autocast=autocast, time_fills=time_fills,
            between=probes.probe, autocast_dtype=autocast_of(config.precision.name),
        )  # fmt: skip
        per_byte = measure_step_seconds_per_byte(config, dtype, device)
        compressing = _compression_seconds_per_byte(config, profile, dtype, device)
    gc.collect()
    return replace(
        timed,
        optimizer_seconds_per_byte=per_byte,
        compression_seconds_per_byte=compressing,
        measured_at=time.time(),
        busy_share=probes.share,
    )


def time_layers(
    profile: ModelProfile,
    sources: Sequence[LayerSource],
    batch: tuple[Any, Any],
    loss: LossFunction,
    *,
    dtype: torch.dtype,
    autocast: Callable[[Any], Any] = lambda function: function,
    time_fills: TimeFills = tuple,
    between: Callable[[], None] = lambda: None,
    autocast_dtype: torch.dtype | None = None,
) -> ModelProfile:
    """The profile with seconds of every layer and of the loss; each runs alone, on real tensors, where the batch is.

    Of layers that are alike (see :mod:`runner.profiling.alike`) the first ones are timed, and the others get the
    medians of these: they run forward once, for the next layer's input.

    Args:
        profile: rows of ``sources`` and of the loss; their bytes and FLOPs stay.
        sources: the layers; each is built, timed and dropped.
        batch: the first layer's input, and the targets.
        loss: takes the last layer's output and the targets.
        dtype: the precision of weights.
        autocast: wraps a layer's function that computes in another precision.
        time_fills: adds seconds to the fills of a layer's bubbles, see :class:`runner.profiling.fills.FillProfiler`.
        between: is called after each layer that is timed.
        autocast_dtype: the precision to which ``autocast`` computes, if any.

    Raises:
        LayerError: a layer or the loss refuses its input's values.
    """
    (value, targets), samples, rows = batch, num_samples(batch[0]), []
    device = flatten(batch)[0][0].device
    alike = defaultdict[Hashable, list[LayerProfile]](list)
    ranges = list[_Range]()
    for source, row in zip(sources, profile.layers, strict=True):
        module = cast_module(source.build().to(device=device), dtype)
        function = autocast(source.calling(module))
        before = alike[_kind_of(module, value, row)]
        with about_layer(source.index, module, value):  # fake tensors have no ids that could be out of range
            if len(before) < _TIMED_ALIKE:
                if not before and source.around is None and not is_torchs_own(module):
                    narrow = torch.float16 in (dtype, autocast_dtype)
                    row = replace(row, repeats=repeats(source.index, function, value, module, narrow=narrow))
                value, timed = _time_call(function, value, device, row, ranges)
                before.append(timed)
                between()
            else:
                value, timed = map_tensors(as_leaf, _forward(function, value)[0]), _with_seconds_of(before, row)
        module.zero_grad(set_to_none=True)
        rows.append(replace(timed, fills=time_fills(row.fills)))
    value = for_loss(value)
    with about_loss((value, targets)):
        _, timed_loss = _time_call(partial(_summed, loss, targets, samples), value, device, profile.loss, ranges)
    between()
    whole = sum(each.seconds for each in ranges)
    spread = sum(each.half for each in ranges) / whole if whole else 0.0
    return replace(profile, layers=tuple(rows), loss=timed_loss, seconds_source="measured", spread=spread)


def _kind_of(module: nn.Module, value: Any, row: LayerProfile) -> Hashable:
    """What layers have in common that take the same time."""
    tensors, nesting = flatten(value)
    forms = tuple((tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors)
    return structure_of(module), json.dumps(nesting), forms, row.split is not None and row.split.kept


def _with_seconds_of(timed: Sequence[LayerProfile], row: LayerProfile) -> LayerProfile:
    """The row with the medians of the seconds of layers that are alike."""
    seconds = {name: median(getattr(each, name) for each in timed) for name in _SECONDS}
    shares = [each.split.kept_share for each in timed if each.split is not None]
    split = row.split if row.split is None or not shares else replace(row.split, kept_share=median(shares))
    return replace(row, **seconds, split=split)


def _compression_seconds_per_byte(
    config: RunConfig, profile: ModelProfile, dtype: torch.dtype, device: torch.device
) -> float:
    """Seconds per byte of gradient that the request's compressor computes, on tensors of the model's own shapes."""
    kind = compression_of(config.compression)
    if kind.compress is None:
        return 0.0
    shapes: list[tuple[int, ...]] = []
    for shape in (shape for layer in profile.layers for shape in layer.trained_shapes):
        shapes.append(shape)
        if sum(map(prod, shapes)) > _MOST_ELEMENTS_TO_COMPRESS:
            break
    if not shapes:
        return 0.0
    compress = kind.compress(config.compression, kind.has_residuals(config.compression))
    seconds = compression_seconds(compress, shapes, max(2, config.parallelism.data), device, runs=_TIMED_RUNS)
    return seconds / (sum(map(prod, shapes)) * dtype.itemsize)


def _summed(loss: LossFunction, targets: Any, samples: int, output: Any) -> Tensor:
    return loss_sum(loss(output, targets), samples)[0]


class _Range(NamedTuple):
    """The median seconds of a layer's forward and backward, and half of what lies between its shortest and longest."""

    seconds: float
    half: float


def _time_call(
    function: Any, value: Any, device: torch.device, row: LayerProfile, ranges: list[_Range]
) -> tuple[Any, LayerProfile]:
    """Return the output of ``function``, and its row with seconds, of which the range is added to ``ranges``."""
    lists: tuple[list[float], ...] = ([], [], [], [])
    forward, backward, of_input, of_weights = lists
    alone: list[float] = []
    output: Any = None
    for _ in range(_TIMED_RUNS + 1):
        _, _, roots = _forward(function, value)
        with _timed(backward, device):
            if roots:
                torch.autograd.backward(roots, _ones(roots))
        with _timed(forward, device):
            output, leaves, roots = _forward(function, value)
        with _timed(of_input, device):
            _, pending = backward_input(roots, _ones(roots), leaves)
        with _timed(of_weights, device):
            backward_weight(pending)
        if row.split is not None and row.split.kept:
            _, leaves, roots = _forward(function, value)
            with _timed(alone, device):
                torch.autograd.grad(roots, leaves, _ones(roots), allow_unused=True)
    medians = [median(seconds[1:]) for seconds in lists]
    whole = [sum(pair) for pair in zip(forward[1:], backward[1:], strict=True)]
    ranges.append(_Range(median(whole), (max(whole) - min(whole)) / 2))
    return map_tensors(as_leaf, output), replace(
        row,
        forward_seconds=medians[0],
        backward_seconds=medians[1],
        input_gradient_seconds=medians[2],
        weight_gradient_seconds=medians[3],
        split=_with_kept_seconds(row.split, medians, alone),
    )


def _with_kept_seconds(
    split: SplitBackward | None, medians: Sequence[float], alone: Sequence[float]
) -> SplitBackward | None:
    """``split`` with the share that stays in I, if something does; ``alone``: seconds of the input's gradient alone."""
    if split is None or not alone:
        return split
    return split.with_kept_share(medians[1], medians[2], median(alone[1:]))


def _forward(function: Any, value: Any) -> tuple[Any, list[Tensor], list[Tensor]]:
    """Return the output, and those leaves of the input and roots of the output that require gradients."""
    given = map_tensors(as_leaf, value)
    output = function(enter_graph(given))
    leaves, roots = ([tensor for tensor in flatten(part)[0] if tensor.requires_grad] for part in (given, output))
    return output, leaves, roots


def _ones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.ones_like(tensor) for tensor in tensors]


@contextlib.contextmanager
def _timed(seconds: list[float], device: torch.device) -> Iterator[None]:
    start = _now(device)
    yield
    seconds.append(_now(device) - start)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
