"""What a plan needs to know of a model: one row of numbers per layer, no modules.

``runner.model`` makes a :class:`ModelProfile`, from the model on the meta device (bytes, FLOPs) and, where
it may run the layers, from a clock. This room only reads it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["PROFILE_FILE", "LayerProfile", "ModelProfile", "SecondsSource", "profile_from_json", "read_profile"]

PROFILE_FILE = "profile.json"

SecondsSource = Literal["measured", "estimated"]


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer's cost for one micro-batch of :attr:`ModelProfile.samples` samples. Sizes are bytes.

    Args:
        name: the layer's name in the model.
        num_parameters: elements of its parameters.
        weight_bytes: its parameters and buffers.
        gradient_bytes: its trainable parameters' gradients.
        saved_bytes: what autograd keeps after its forward, its output included, its input excluded.
        output_bytes: its output.
        forward_transient_bytes: peak above that steady state while it runs forward.
        backward_transient_bytes: peak while it runs backward above (saved + the gradient of its output);
            it contains the gradient of its input.
        forward_flops, backward_flops: floating-point operations.
        forward_seconds, backward_seconds: seconds on the machine that is planned for.
        largest_parameter_bytes: its largest trainable parameter's gradient; 0 = not known, read as gradient_bytes.
    """

    name: str
    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    forward_flops: float
    backward_flops: float
    forward_seconds: float
    backward_seconds: float
    largest_parameter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A whole model: its layers in order, and the loss as one more layer without parameters.

    Args:
        layers: the layers, first to last.
        loss: the loss function, seen as a layer on the last stage (its output is a scalar).
        samples: samples of the profiled micro-batch: the largest of a step.
        input_bytes, target_bytes: one micro-batch of each.
        seconds_source: where the seconds come from.
        optimizer_bytes_per_gradient_byte: e.g. 2.0 for Adam in the parameters' own precision; fp32 masters of
            16-bit weights count here.
        optimizer_seconds_per_byte: seconds of an optimizer step per byte of gradient.
        tokens_per_sample: for tokens/s; None where a sample is not a sequence of tokens.
        master_bytes_per_gradient_byte: of fp32 master weights; 0 where the optimizer updates the weights themselves.
            A step with masters makes gradients as wide as they are, and drops them.
    """

    layers: tuple[LayerProfile, ...]
    loss: LayerProfile
    samples: int
    input_bytes: int
    target_bytes: int
    seconds_source: SecondsSource
    optimizer_bytes_per_gradient_byte: float
    optimizer_seconds_per_byte: float
    tokens_per_sample: int | None = None
    master_bytes_per_gradient_byte: float = 0.0

    def to_json(self) -> str:
        """The profile as one JSON document; numbers in full precision."""
        return json.dumps(asdict(self), indent=1) + "\n"


def profile_from_json(text: str) -> ModelProfile:
    """The inverse of :meth:`ModelProfile.to_json`. Raises TypeError or KeyError where it is no profile."""
    document = json.loads(text)
    layers = tuple(LayerProfile(**layer) for layer in document.pop("layers"))
    return ModelProfile(layers=layers, loss=LayerProfile(**document.pop("loss")), **document)


def read_profile(run_dir: Path) -> ModelProfile:
    """The profile that a run's plan was made from. Raises FileNotFoundError."""
    return profile_from_json((run_dir / PROFILE_FILE).read_text(encoding="utf-8"))
