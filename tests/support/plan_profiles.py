"""Small made-up profiles for the tests of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runner.profile import LayerProfile, ModelProfile


def layer(**changes: Any) -> LayerProfile:
    figures: dict[str, Any] = {
        "name": "layer",
        "num_parameters": 10,
        "weight_bytes": 40,
        "gradient_bytes": 40,
        "saved_bytes": 30,
        "output_bytes": 10,
        "forward_transient_bytes": 5,
        "backward_transient_bytes": 12,
        "forward_flops": 100.0,
        "backward_flops": 200.0,
        "forward_seconds": 1.0,
        "backward_seconds": 2.0,
    }
    return LayerProfile(**(figures | changes))


def loss_layer(**changes: Any) -> LayerProfile:
    nothing: dict[str, Any] = {
        "name": "loss",
        "num_parameters": 0,
        "weight_bytes": 0,
        "gradient_bytes": 0,
        "saved_bytes": 0,
        "output_bytes": 0,
        "forward_transient_bytes": 0,
        "backward_transient_bytes": 0,
        "forward_flops": 0.0,
        "backward_flops": 0.0,
        "forward_seconds": 0.0,
        "backward_seconds": 0.0,
    }
    return LayerProfile(**(nothing | changes))


def model(layers: Sequence[LayerProfile], **changes: Any) -> ModelProfile:
    figures: dict[str, Any] = {
        "layers": tuple(layers),
        "loss": loss_layer(),
        "samples": 1,
        "input_bytes": 7,
        "target_bytes": 3,
        "seconds_source": "measured",
        "optimizer_bytes_per_gradient_byte": 2.0,
        "optimizer_seconds_per_byte": 0.0,
    }
    return ModelProfile(**(figures | changes))
