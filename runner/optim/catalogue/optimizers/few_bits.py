"""Adam with moments of 4 bits or of 8-bit floating point, from torchao."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from runner.config.schema import OptimizerConfig
from runner.optim.blocks import BLOCK_4, BLOCK_FP8, SMALLEST_TORCHAO
from runner.optim.catalogue.kind import BETAS, FP32_WIDTH, OptimizerKind, common_settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["ADAM4BIT", "ADAM_FP8"]

_MODULE = "runner.optim.kinds.few_bits"


def _adam4bit(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.few_bits import Adam4bit

    return Adam4bit(parameters, **common_settings(section))


def _adam_fp8(section: OptimizerConfig, parameters: list[Tensor]) -> Optimizer:
    from runner.optim.kinds.few_bits import AdamFp8

    return AdamFp8(parameters, **common_settings(section))


def _in_blocks(elements: int, *, block: int, bits: int) -> int:
    """Bytes of two moments with an fp32 scale per block; tensors that are small or do not divide stay fp32."""
    if elements < SMALLEST_TORCHAO or elements % block:
        return 2 * FP32_WIDTH * elements
    return 2 * (elements * bits // 8 + FP32_WIDTH * elements // block)


ADAM4BIT = OptimizerKind(
    name="adam4bit",
    description="AdamW with moments of 4 bits in blocks",
    cost="2 of 4 bits",
    remarks="torchao; not with `zero.stage` 1 to 3",
    make=_adam4bit,
    temporaries=6,
    lingering=0,
    values=2.0,
    state_bytes=partial(_in_blocks, block=BLOCK_4, bits=4),
    count_bytes=FP32_WIDTH,
    reads=BETAS,
    decoupled=True,
    package="torchao",
    imports=(_MODULE,),
    classes=(f"{_MODULE}.Adam4bit",),
)

ADAM_FP8 = OptimizerKind(
    name="adam_fp8",
    description="AdamW with moments in float8_e4m3fn in blocks",
    cost="2 of 8 bits",
    remarks="torchao; not with `zero.stage` 1 to 3",
    make=_adam_fp8,
    temporaries=6,
    lingering=0,
    values=2.0,
    state_bytes=partial(_in_blocks, block=BLOCK_FP8, bits=8),
    count_bytes=FP32_WIDTH,
    reads=BETAS,
    decoupled=True,
    package="torchao",
    imports=(_MODULE,),
    classes=(f"{_MODULE}.AdamFp8",),
)
