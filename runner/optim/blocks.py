"""Sizes of the blocks in which optimizers keep moments of few bits; they are read without the optimizers' packages."""

from __future__ import annotations

__all__ = ["BLOCK_4", "BLOCK_8", "BLOCK_FP8", "SMALLEST_8", "SMALLEST_TORCHAO"]

BLOCK_8 = 256
"""Number of elements that share a scale; bitsandbytes/backends/cpu/ops.py: _optimizer_update_8bit_blockwise_cpu."""

SMALLEST_8 = 4096
"""Size of the smallest tensor that it cuts into blocks; bitsandbytes/optim/optimizer.py: min_8bit_size."""

BLOCK_4 = 128
"""Number of elements in a block of ``adam4bit``; torchao/optim/adam.py: AdamW4bit, block_size."""

BLOCK_FP8 = 256
"""Number of elements in a block of ``adam_fp8``; torchao/optim/adam.py: AdamWFp8, block_size."""

SMALLEST_TORCHAO = 4096
"""Size of the smallest tensor that both cut into blocks; torchao/optim/adam.py: _new_buffer."""
