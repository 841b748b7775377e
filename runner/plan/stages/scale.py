"""Scales a profile that was measured for one micro-batch size to another size.

Activations, FLOPs and seconds are proportional to the number of samples. The bytes of weights and gradients do not
change, and neither does the part of a backward's transient bytes that is the layer's temporary weight gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, fields, is_dataclass, replace
from fractions import Fraction
from typing import Any

from runner.profile import (
    BoundaryTensor,
    Exchange,
    FillProfile,
    GradientPeaks,
    LayerProfile,
    ModelProfile,
    SharedGradient,
)

__all__ = ["between", "for_samples"]


def for_samples(profile: ModelProfile, samples: int) -> ModelProfile:
    """The profile for micro-batches of ``samples`` samples (at least 1), with sizes rounded up to whole bytes.

    The result is exact if every activation is proportional to the samples, as in layers that treat each sample alone.
    """
    samples = max(samples, 1)
    if samples == profile.samples:
        return profile
    ratio = Fraction(samples, profile.samples)
    return replace(
        profile,
        layers=tuple(_scaled(layer, ratio) for layer in profile.layers),
        loss=_scaled(profile.loss, ratio),
        samples=samples,
        input_bytes=_bytes(profile.input_bytes, ratio),
        target_bytes=_bytes(profile.target_bytes, ratio),
        cast_bytes=_bytes(profile.cast_bytes, ratio),
        rehearsals=(),
    )


def between(few: ModelProfile, many: ModelProfile, samples: int) -> ModelProfile:
    """The profile for micro-batches of ``samples`` samples, on the lines through the figures of two sizes.

    Part of what a layer saves may not grow with the samples, such as the casts of weights that autocast makes.

    Args:
        few, many: profiles of the same model with fewer and with more samples in a micro-batch.
        samples: the size, which may be outside of theirs.
    """
    if samples in (few.samples, many.samples):
        return few if samples == few.samples else many
    nearest = min((few, many), key=lambda each: abs(each.samples - samples))
    at = Fraction(samples - few.samples, many.samples - few.samples)
    made: ModelProfile = _between(for_samples(nearest, samples), few, many, at)
    return made


def _between(made: Any, few: Any, many: Any, at: Fraction) -> Any:
    """Figures at a place between two others; what these do not both have is left as it is."""
    if not type(made) is type(few) is type(many) or isinstance(made, (bool, str)):
        return made
    if is_dataclass(made) and not isinstance(made, type):
        names = [each.name for each in fields(made)]
        return replace(
            made,
            **{name: _between(getattr(made, name), getattr(few, name), getattr(many, name), at) for name in names},
        )
    if isinstance(made, Mapping):
        return {key: _between(made[key], few.get(key), many.get(key), at) for key in made}
    if isinstance(made, tuple) and len(made) == len(few) == len(many):
        values = [_between(*each, at) for each in zip(made, few, many, strict=True)]
        return type(made)(*values) if hasattr(made, "_fields") else tuple(values)
    if isinstance(made, int):
        return few if few == many else math.ceil(few + (many - few) * at)
    if isinstance(made, float):
        return max(few + (many - few) * float(at), 0.0)
    return made


def _scaled(layer: LayerProfile, ratio: Fraction) -> LayerProfile:
    times = float(ratio)
    return replace(
        layer,
        saved_bytes=_bytes(layer.saved_bytes, ratio),
        output_bytes=_bytes(layer.output_bytes, ratio),
        forward_transient_bytes=_bytes(layer.forward_transient_bytes, ratio),
        backward_transient_bytes=_with_weight_gradient(layer.backward_transient_bytes, layer, ratio) or 0,
        forward_flops=layer.forward_flops * times,
        backward_flops=layer.backward_flops * times,
        forward_seconds=layer.forward_seconds * times,
        backward_seconds=layer.backward_seconds * times,
        input_gradient_seconds=_maybe_seconds(layer.input_gradient_seconds, times),
        forward_exchanges=_scaled_exchanges(layer.forward_exchanges, ratio),
        backward_exchanges=_scaled_exchanges(layer.backward_exchanges, ratio),
        weight_gradient_seconds=_maybe_seconds(layer.weight_gradient_seconds, times),
        unsaved_forward_bytes=_maybe_bytes(layer.unsaved_forward_bytes, ratio),
        output=tuple(
            BoundaryTensor(each.storage, _bytes(each.num_bytes, ratio), _bytes(each.gradient_bytes, ratio))
            for each in layer.output
        ),
        shared_gradients=tuple(
            SharedGradient(each.storages, _bytes(each.num_bytes, ratio)) for each in layer.shared_gradients
        ),
        output_gradient_bytes=_maybe_bytes(layer.output_gradient_bytes, ratio),
        chained_backward_bytes=_with_weight_gradient(layer.chained_backward_bytes, layer, ratio),
        asking_bytes=_with_weight_gradient(layer.asking_bytes, layer, ratio) or 0,
        gradient_peaks=_scaled_gradient_peaks(layer, ratio),
        recomputation={
            name: replace(
                figures,
                kept_bytes=_bytes(figures.kept_bytes, ratio),
                released_bytes=_bytes(figures.released_bytes, ratio),
                recomputed_bytes=_bytes(figures.recomputed_bytes, ratio),
                recomputed_flops=figures.recomputed_flops * times,
                second_peak_bytes=_maybe_bytes(figures.second_peak_bytes, ratio),
            )
            for name, figures in layer.recomputation.items()
        },
        fills=tuple(_scaled_fill(fill, ratio, times) if fill.of_microbatch else fill for fill in layer.fills),
        split=None
        if layer.split is None
        else replace(
            layer.split,
            deferred_bytes=_bytes(layer.split.deferred_bytes, ratio),
            input_bytes=_bytes(layer.split.input_bytes, ratio),
            held_bytes=_bytes(layer.split.held_bytes, ratio),
            gradient_bytes=_bytes(layer.split.gradient_bytes, ratio),
            transient_bytes=_beside(layer.split.waiting_bytes, layer.split.transient_bytes, ratio) or 0,
            chained_transient_bytes=_beside(layer.split.waiting_bytes, layer.split.chained_transient_bytes, ratio),
        ),
    )


def _scaled_exchanges(exchanges: tuple[Exchange, ...], ratio: Fraction) -> tuple[Exchange, ...]:
    return tuple(replace(each, num_bytes=_bytes(each.num_bytes, ratio)) for each in exchanges)


def _scaled_gradient_peaks(layer: LayerProfile, ratio: Fraction) -> GradientPeaks | None:
    known = layer.gradient_peaks
    if known is None:
        return None
    peaks = astuple(known)
    return GradientPeaks(*(_with_weight_gradient(peak, layer, ratio) or 0 for peak in peaks))


def _scaled_fill(fill: FillProfile, ratio: Fraction, times: float) -> FillProfile:
    return replace(
        fill,
        rows=math.ceil(fill.rows * ratio),
        flops=fill.flops * times,
        kept_bytes=_bytes(fill.kept_bytes, ratio),
        seconds=fill.seconds * times,
    )


def _with_weight_gradient(transient: int | None, layer: LayerProfile, ratio: Fraction) -> int | None:
    """Scale the peak of a backward, except for the gradient of the weights in it."""
    if transient is None:
        return None
    fixed = layer.gradient_bytes if transient < 0 else min(layer.gradient_bytes, transient)
    return fixed + _bytes(transient - fixed, ratio)


def _beside(waiting: int, transient: int | None, ratio: Fraction) -> int | None:
    """Scale the peak of I, except for the gradients of weights that wait in it."""
    return None if transient is None else waiting + _bytes(max(transient - waiting, 0), ratio)


def _maybe_seconds(seconds: float | None, times: float) -> float | None:
    return None if seconds is None else seconds * times


def _maybe_bytes(size: int | None, ratio: Fraction) -> int | None:
    return None if size is None else _bytes(size, ratio)


def _bytes(size: int, ratio: Fraction) -> int:
    return math.ceil(size * ratio)
