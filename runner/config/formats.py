"""The formats in which ``runner export`` writes weights."""

from __future__ import annotations

__all__ = ["DTYPES", "FORMATS", "MAX_SHARD_SIZE"]

FORMATS = ("safetensors", "huggingface", "peft", "dcp")
"""The first is one file and the default; the others are folders."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Types of floating-point tensors, and torch's names of them."""

MAX_SHARD_SIZE = "5GB"
"""The most bytes of one file of the format huggingface, unless told."""
