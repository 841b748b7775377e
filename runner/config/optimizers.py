"""What each ``optimizer=`` is: what it reads of its section, what must be installed, what may share it out.

Data alone, so that rules, plan and launch agree on it without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "BLOCK_4",
    "BLOCK_8",
    "BLOCK_FP8",
    "ERROR_WIDTH",
    "OPTIMIZERS",
    "SMALLEST_8",
    "SMALLEST_IN_BLOCKS",
    "OptimizerKind",
    "is_kin_of_adam",
    "operator_of",
]

ERROR_WIDTH = 4
"""Bytes of an element of what compression left over: fp32."""

_BETAS = ("betas", "eps")
_WIDE = 4  # bytes of an fp32 state

BLOCK_8 = 256
"""Elements of a block of ``adam8bit``; bitsandbytes/backends/cpu/ops.py: _optimizer_update_8bit_blockwise_cpu."""

SMALLEST_8 = 4096
"""Elements of the smallest tensor that it cuts into blocks; bitsandbytes/optim/optimizer.py: min_8bit_size."""

BLOCK_4 = 128
"""Elements of a block of ``adam4bit``; torchao/optim/adam.py: AdamW4bit, block_size."""

BLOCK_FP8 = 256
"""Elements of a block of ``adam_fp8``; torchao/optim/adam.py: AdamWFp8, block_size."""

SMALLEST_IN_BLOCKS = 4096
"""Elements of the smallest tensor that both cut into blocks; torchao/optim/adam.py: _new_buffer."""

_CODES_8 = 2 * 256 * _WIDE  # what a byte stands for, of either moment


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """One optimizer.

    Args:
        values: states of a parameter's own format that it keeps per element; momentum's is counted where it is on.
        reads: keys of its section besides ``lr`` and ``weight_decay``.
        decoupled: whether weight decay leaves the moments alone; None = as ``optimizer.decoupled_weight_decay`` says.
        package: what must be installed, by the name it is imported by.
        extra: the extra of this package that installs it.
        operator: DeepSpeed's, compiled when it is first used.
        elementwise: an element's update depends on that element's gradients alone, so that flat partitions may cut
            weights anywhere.
        compresses: replicas exchange one bit per element of the momentum in place of gradients, at some steps.
        curvature: it preconditions layers, and keeps factors of their curvature.
        state_bytes: of one tensor of so many elements, where that is not ``values`` in the parameter's own format.
        constant_bytes: tables that it keeps once.
    """

    values: float = 2.0
    reads: tuple[str, ...] = _BETAS
    decoupled: bool | None = True
    package: str | None = None
    extra: str | None = None
    operator: str | None = None
    elementwise: bool = True
    compresses: bool = False
    curvature: bool = False
    state_bytes: Callable[[int], int] | None = None
    constant_bytes: int = 0


def operator_of(name: str) -> str | None:
    """DeepSpeed's operator that ``optimizer=name`` needs compiled; None where it needs none."""
    return OPTIMIZERS[name].operator if name in OPTIMIZERS else None


def is_kin_of_adam(name: str) -> bool:
    """Whether it takes Adam's settings, so that a recipe's mean the same to it."""
    return name in OPTIMIZERS and OPTIMIZERS[name].reads == _BETAS


def _blockwise_8bit(elements: int) -> int:
    """Two moments of a byte each, and the largest of every block of both in fp32; small tensors stay fp32."""
    if elements < SMALLEST_8:
        return 2 * _WIDE * elements
    return 2 * (elements + _WIDE * -(-elements // BLOCK_8))


def _in_blocks(elements: int, block: int, bits: int) -> int:
    """Two moments, and an fp32 scale for every block of both; tensors that are small or do not divide stay fp32."""
    if elements < SMALLEST_IN_BLOCKS or elements % block:
        return 2 * _WIDE * elements
    return 2 * (elements * bits // 8 + _WIDE * elements // block)


def _blockwise_4bit(elements: int) -> int:
    return _in_blocks(elements, BLOCK_4, 4)


def _blockwise_fp8(elements: int) -> int:
    return _in_blocks(elements, BLOCK_FP8, 8)


def _two_fp32(elements: int) -> int:
    return 2 * _WIDE * elements


def _three_fp32(elements: int) -> int:
    return 3 * _WIDE * elements


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind(),
    "adam": OptimizerKind(decoupled=None),
    "sgd": OptimizerKind(values=0.0, reads=("momentum",), decoupled=False),
    "auto": OptimizerKind(),
    "adam8bit": OptimizerKind(
        package="bitsandbytes", extra="optimizers", state_bytes=_blockwise_8bit, constant_bytes=_CODES_8
    ),
    "adam4bit": OptimizerKind(package="torchao", extra="optimizers", elementwise=False, state_bytes=_blockwise_4bit),
    "adam_fp8": OptimizerKind(package="torchao", extra="optimizers", elementwise=False, state_bytes=_blockwise_fp8),
    "cpu_adam": OptimizerKind(decoupled=None, package="deepspeed", extra="zero", operator="cpu_adam"),
    "fused_adam": OptimizerKind(decoupled=None, package="deepspeed", extra="zero", operator="fused_adam"),
    "lars": OptimizerKind(
        values=0.0,
        reads=("momentum",),
        decoupled=False,
        package="pytorch_optimizer",
        extra="optimizers",
        elementwise=False,
    ),
    "lamb": OptimizerKind(package="pytorch_optimizer", extra="optimizers", elementwise=False),
    "custom": OptimizerKind(reads=(), decoupled=None, elementwise=False),
    "kfac": OptimizerKind(values=0.0, reads=("momentum",), decoupled=False, elementwise=False, curvature=True),
    "onebit_adam": OptimizerKind(elementwise=False, compresses=True, state_bytes=_two_fp32),
    "zero_one_adam": OptimizerKind(elementwise=False, compresses=True, state_bytes=_two_fp32),
    "onebit_lamb": OptimizerKind(values=3.0, elementwise=False, compresses=True, state_bytes=_three_fp32),
}
