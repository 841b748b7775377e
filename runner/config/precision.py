"""The number formats of each ``precision=``. Formats have torch's names, but nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.schema import RunConfig

__all__ = ["PRECISIONS", "Precision", "weight_widths"]

_WIDTHS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Precision:
    """The number formats of one run. The loss is computed in fp32, or in fp64 where the model's output is.

    Args:
        weights: format of weights, their gradients and, unless ``autocast`` says otherwise, activations.
        autocast: format in which torch.autocast computes matrix products; None = the format of the weights.
        master_weights: whether the optimizer keeps fp32 weights and states and rounds the weights after each step.
        loss_scaling: whether the loss is scaled dynamically, because small gradients underflow in this format.
        four_bits: whether linear maps compute with numbers of four bits, which are emulated.
        arithmetic: the key of ``hardware.flops`` whose peak the matrix products can reach.
    """

    weights: str
    autocast: str | None = None
    master_weights: bool = False
    loss_scaling: bool = False
    four_bits: bool = False
    arithmetic: str = "fp32"


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("float32"),
    "fp64": Precision("float64", arithmetic="fp64"),
    "bf16": Precision("bfloat16", arithmetic="bf16"),
    "bf16_master": Precision("bfloat16", master_weights=True, arithmetic="bf16"),
    "bf16_mixed": Precision("float32", autocast="bfloat16", arithmetic="bf16"),
    "fp16": Precision("float16", master_weights=True, loss_scaling=True, arithmetic="fp16"),
    "fp16_mixed": Precision("float32", autocast="float16", loss_scaling=True, arithmetic="fp16"),
    "fp4_emulated": Precision("float32", four_bits=True),
}


def weight_widths(config: RunConfig) -> tuple[int, int]:
    """The bytes of an element of the weights, and of an element of what the optimizer updates."""
    precision = PRECISIONS[config.precision.name]
    width = _WIDTHS[precision.weights]
    return width, _WIDTHS["float32"] if precision.master_weights else width
