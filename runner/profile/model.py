"""A whole model: the rows of its layers, and what is known of all of them together."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Literal

from runner.profile.layer import LayerProfile

__all__ = [
    "ChangedState",
    "ModelProfile",
    "NOTICEABLE_SHARE",
    "OddWeight",
    "Rehearsal",
    "SecondsSource",
    "SharedWeight",
]

SecondsSource = Literal["measured", "estimated"]
NOTICEABLE_SHARE = 0.1
"""The share of a core that other work may take while seconds are measured without being told."""


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """A weight that several layers include in their figures.

    Args:
        layers: their indices, each once.
        weight_bytes: bytes of the weight.
        gradient_bytes: bytes of its gradient; 0 if it is frozen.
        optimizer_bytes: bytes of its optimizer states, as for a layer.
        num_parameters: its elements.
        shape: its shape; empty = not known.
    """

    layers: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None = None
    num_parameters: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OddWeight:
    """A weight that is complex, has no elements or was not made in fp32, which not every option can handle.

    Args:
        name: its global name.
        dtype: its format as the model's function makes it, by torch's name.
        num_parameters: its elements.
        trained: whether it is trained.
    """

    name: str
    dtype: str
    num_parameters: int
    trained: bool


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What one micro-batch takes in a stage whose program decides in the run, found out on tensors without memory.

    Args:
        program: the stage's program, as ``repr`` writes it.
        saved_bytes: what is alive after the forward, and was not before, with the stage's output. The last stage's
            forward includes the loss.
        forward_peak_bytes: the most of it while the forward runs.
        backward_peak_bytes: the peak of the backward above what is alive when it begins. That includes the gradient of
            the output; gradients of weights are there already.
        later_backward_peak_bytes: the same from its first gradient of a weight on.
        growing_backward_peak_bytes: the same if no gradients of weights are there before, so that they count.
        backward_flops: FLOPs of the backward, with what runs again in it.
        runs: whether the program can run. If not, more is needed at once than it may keep, and all else is 0.
    """

    program: str
    saved_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    later_backward_peak_bytes: int = 0
    growing_backward_peak_bytes: int = 0
    backward_flops: float = 0.0
    runs: bool = True


@dataclass(frozen=True, slots=True)
class ChangedState:
    """Something that the forward of a layer changes, beside buffers, on which its next forward depends.

    Args:
        name: what the model's code calls it.
        weight: whether it is a parameter.
        trained: whether it is a parameter that is trained.
    """

    name: str
    weight: bool
    trained: bool


@dataclass(frozen=True)
class OwnUpdate:
    """What updates of an optimizer of the user's make and drop.

    Args:
        temporaries: tensors of the size of a weight.
        lingering: how many of them are dropped only when the next weight's are made.
        at_once: further bytes for each byte of all weights of a rank.
        in_groups: whether it puts weights and biases into groups of their own, so that it does not go by the model's
            order.
    """

    temporaries: int
    lingering: int
    at_once: float
    in_groups: bool = False


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A whole model: its layers in order, and the loss as one more layer without parameters.

    Args:
        layers: the layers, first to last.
        loss: the loss function, as a layer of the last stage (its output is a scalar).
        samples: samples of the profiled micro-batch: the largest of a step.
        input_bytes, target_bytes: inputs and targets of one micro-batch.
        cast_bytes: the copy of its inputs in the format of the weights; 0 if they have it already.
        seconds_source: where the seconds come from.
        optimizer_bytes_per_gradient_byte: e.g. 2.0 for Adam in the parameters' own precision; fp32 masters of
            16-bit weights are included.
        states_per_gradient_byte: the part of them that the optimizer makes only with a weight's first gradient, so that
            a weight that none reaches has none; 0 = not known, or made at once.
        optimizer_seconds_per_byte: seconds of an optimizer step per byte of gradient.
        tokens_per_sample: for tokens/s; None if a sample is not a sequence of tokens.
        master_bytes_per_gradient_byte: fp32 master weights; 0 if the optimizer updates the weights themselves. A
            step with masters makes gradients of the masters' size and drops them.
        shared: weights of several layers; a rank holds one copy for all of its layers.
        optimizer_constant_bytes: tables that the optimizer keeps once, whatever it updates.
        own_update: what updates of an optimizer make and drop that does not describe itself; None: its kind says it.
        sample_shapes: the shape of one sample in each tensor of the input; empty if they are not known.
        compression_seconds_per_byte: what ``compression=`` computes in a step, in seconds per byte of gradient, without
            its messages; 0 if it was not measured.
        compression_waiting_bytes, compression_peak_bytes: the bytes per element of a gradient that ``compression=``
            needs while it waits for messages or for the end of the step, and at most; 0 if they are not known.
        compression_largest_share, compression_largest_bytes: the share of the elements that the largest gradient had
            where that was tried, and the bytes that it needs for each element of a larger share at most beside them.
        sizes_vary: whether what layers return may have other shapes, or other plain values, for inputs of the same
            shapes. It is false only if the layers ran on tensors without values, and gave the same each time.
        sizes_were_seen_to_vary: whether other samples gave other shapes, so that bytes and seconds are an estimate.
        largest_of_samples: how many samples of different sizes were looked at, of which the largest was profiled. It is
            0 if all had one size.
        rehearsals: what is known of programs that decide in the run.
        first_backwards: where weights are at home in the host's memory, the same profile with the figures of each
            stage's first backward of a step, before which there are no gradients. A measured profile has none;
            :func:`runner.plan.weights.with_units` writes it.
        odd_weights: the weights that are complex, empty or of another format than fp32.
        changed_buffers: buffers that the forward of a layer changes; of layers that are alike those of the first.
        shared_buffers: the buffers among them that other layers use, too.
        unsaved_buffers: the buffers among them that are in no state dict.
        changed_states: what forwards of layers change besides buffers.
        in_evaluation: how many modules the model's function returned in evaluation mode, in which they stay.
        cut_finely: whether a traced model is cut into more layers than for two stages, so that these have other layers.
        measured_at: when the seconds were measured, in seconds since 1970; None if they were not.
        busy_share: the share of a core that other work took meanwhile.
        spread: half of what lay between the shortest and the longest repeats of timed layers, as a share of seconds.
        parameters_elsewhere, trained_elsewhere: elements of divided weights that other ranks have, and of those among
            them that are trained.
        divided_shapes: the shape of the part of each weight that ranks divide, of those that are trained.
        whole_weights: where ranks divide layers: the weights that were looked at and stay whole, each with the reason.
        divided_logits: the layer whose logits stay divided in training, because the loss takes parts; empty: none does.
        gathered_logits: a layer of which all ranks put the features together; empty: none is.
        whole_tokens: where ranks also divide the values between layers by tokens: where each has all tokens, and why.
        own_kernels: what a preset of ``kernels`` leaves to the model's code, and why.
        substituted: what is replaced in layers that differ, each with the number of its places.
        exchanges_take_time: whether the seconds of layers contain those of what the ranks that divide them exchange. Of
            a measured profile they do not; :func:`runner.plan.time.tensor.with_exchanges` adds them.
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
    states_per_gradient_byte: float = 0.0
    master_bytes_per_gradient_byte: float = 0.0
    shared: tuple[SharedWeight, ...] = ()
    optimizer_constant_bytes: int = 0
    own_update: OwnUpdate | None = None
    sample_shapes: tuple[tuple[int, ...], ...] = ()
    compression_seconds_per_byte: float = 0.0
    compression_waiting_bytes: float = 0.0
    compression_peak_bytes: float = 0.0
    compression_largest_share: float = 0.0
    compression_largest_bytes: float = 0.0
    cast_bytes: int = 0
    rehearsals: tuple[Rehearsal, ...] = ()
    first_backwards: ModelProfile | None = None
    sizes_vary: bool = False
    sizes_were_seen_to_vary: bool = False
    largest_of_samples: int = 0
    odd_weights: tuple[OddWeight, ...] = ()
    changed_buffers: tuple[str, ...] = ()
    shared_buffers: tuple[str, ...] = ()
    unsaved_buffers: tuple[str, ...] = ()
    changed_states: tuple[ChangedState, ...] = ()
    in_evaluation: int = 0
    cut_finely: bool = False
    measured_at: float | None = None
    busy_share: float = 0.0
    spread: float = 0.0
    parameters_elsewhere: int = 0
    trained_elsewhere: int = 0
    divided_shapes: tuple[tuple[int, ...], ...] = ()
    whole_weights: tuple[str, ...] = ()
    divided_logits: str = ""
    gathered_logits: str = ""
    whole_tokens: tuple[str, ...] = ()
    own_kernels: tuple[str, ...] = ()
    substituted: tuple[str, ...] = ()
    exchanges_take_time: bool = False

    @property
    def age_seconds(self) -> int | None:
        """How long ago the seconds were measured; None if they were not."""
        return None if self.measured_at is None else max(0, round(time.time() - self.measured_at))

    @property
    def is_disturbed(self) -> bool:
        """Whether its seconds were measured while other work took a noticeable share of the processor."""
        return self.busy_share > NOTICEABLE_SHARE

    @property
    def num_parameters(self) -> int:
        """The parameters of the whole model; one that several layers share counts once."""
        again = sum((len(weight.layers) - 1) * weight.num_parameters for weight in self.shared)
        return sum(layer.num_parameters for layer in self.layers) - again + self.parameters_elsewhere

    @property
    def num_trained(self) -> int:
        """The trained parameters of the whole model."""
        again = sum((len(one.layers) - 1) * one.num_parameters for one in self.shared if one.gradient_bytes)
        return sum(layer.num_trained for layer in self.layers) - again + self.trained_elsewhere

    @property
    def parts_named(self) -> dict[str, tuple[str, ...]]:
        """Parts of the model that differ from the others, by what they are, each with the reason; no empty ones."""
        kinds = {"own_kernels": self.own_kernels, "whole_tokens": self.whole_tokens}
        kinds["whole_weights"] = tuple(each.removeprefix("left whole: ") for each in self.whole_weights)
        return {kind: parts for kind, parts in kinds.items() if parts}

    def to_json(self) -> str:
        """The profile as one JSON document; numbers have full precision."""
        return json.dumps(asdict(self), indent=1) + "\n"
