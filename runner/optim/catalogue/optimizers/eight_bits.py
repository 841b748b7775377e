"""Adam with moments of 8 bits, from bitsandbytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.blocks import BLOCK_8, SMALLEST_8
from runner.optim.catalogue.kind import BETAS, FP32_WIDTH, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["ADAM8BIT"]

_CODES = 2 * 256 * FP32_WIDTH  # the tables of the 256 values that a byte stands for, one for each moment


def _make(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.eight_bits import Adam8bit

    made: Optimizer = Adam8bit(parameters, **common_settings(section))
    return made


def _state_bytes(elements: int) -> int:
    """Bytes of two moments of a byte each, with an fp32 maximum for every block of both; small tensors stay fp32."""
    if elements < SMALLEST_8:
        return 2 * FP32_WIDTH * elements
    return 2 * (elements + FP32_WIDTH * -(-elements // BLOCK_8))


ADAM8BIT = OptimizerKind(
    name="adam8bit",
    description="AdamW with moments of 8 bits in blocks",
    cost="2 of 8 bits",
    remarks="bitsandbytes",
    make=_make,
    lingering=0,
    values=2.0,
    state_bytes=_state_bytes,
    constant_bytes=_CODES,
    table_elements=SMALLEST_8,
    reads=BETAS,
    decoupled=True,
    package="bitsandbytes",
    imports=("runner.optim.kinds.eight_bits",),
    elementwise=True,
    place="device",
    classes=("runner.optim.kinds.eight_bits.Adam8bit",),
    counts_steps="number",
)
