"""Estimates seconds from FLOPs, for a machine that is not at hand."""

from __future__ import annotations

from dataclasses import replace

from runner.config.schema import HardwareConfig
from runner.errors import Problem, RequestError
from runner.profile import LayerProfile, ModelProfile

__all__ = ["EFFICIENCY", "with_estimated_seconds"]

# Share of a device's peak FLOP/s that layers of ordinary sizes reach. Large transformers are reported at
# 0.3 to 0.6 of the peak; a plan that rests on this constant says "estimated".
EFFICIENCY = 0.4

# An optimizer's step is bound by memory: Adam reads four numbers and writes three for each gradient, and a device
# moves about one byte in the time of a hundred of its peak FLOP (A100: 1.5e2 in bf16, 1e1 in fp32).
_OPTIMIZER_FLOPS_PER_BYTE = 7 * 100.0


def with_estimated_seconds(
    profile: ModelProfile, hardware: HardwareConfig, precision: str, *, efficiency: float = EFFICIENCY
) -> ModelProfile:
    """The profile with seconds for every layer: its FLOPs / (peak FLOP/s of the precision x efficiency).

    Args:
        profile: its FLOPs are read, and its seconds are replaced.
        hardware: states the peak FLOP/s of one device by the name of a precision.
        precision: the format of the arithmetic, a key of ``hardware.flops`` such as fp32 or bf16.
        efficiency: the share of the peak that is reached.

    Raises:
        RequestError: if the hardware states no FLOP/s for this precision.
    """
    peak = hardware.flops.get(precision)
    if peak is None:
        known = ", ".join(sorted(hardware.flops)) or "none"
        rule = f"states no FLOP/s for precision {precision} (stated: {known})"
        key = f"hardware.flops.{precision}"
        why = f"Seconds that were not measured are estimated from it; {key} takes the peak of the device's data sheet"
        raise RequestError([Problem("hardware", hardware.name, rule, why)])
    rate = peak * efficiency
    return replace(
        profile,
        layers=tuple(_estimated(layer, rate) for layer in profile.layers),
        loss=_estimated(profile.loss, rate),
        seconds_source="estimated",
        optimizer_seconds_per_byte=_OPTIMIZER_FLOPS_PER_BYTE / peak,
    )


def _estimated(layer: LayerProfile, rate: float) -> LayerProfile:
    return replace(
        layer,
        forward_seconds=layer.forward_flops / rate,
        backward_seconds=layer.backward_flops / rate,
        input_gradient_seconds=None,
        weight_gradient_seconds=None,
        fills=tuple(replace(fill, seconds=fill.flops / rate) for fill in layer.fills),
    )
