"""Gradients in 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind, Wire

if TYPE_CHECKING:
    from runner.optim.compression.rounds import Compress

__all__ = ["BF16", "FP16"]


def _in(format_name: str) -> Callable[[CompressionConfig, bool], Compress]:
    def compress(section: CompressionConfig, feedback: bool) -> Compress:
        import torch

        from runner.optim.compression.halved import halved

        return halved(getattr(torch, format_name))

    return compress


def _bytes(wire: Wire) -> float:
    return wire.summed(2 * sum(wire.sizes))


FP16 = CompressionKind(
    name="fp16",
    description="float16, in the range of each step's largest element",
    compress=_in("float16"),
    element_bytes=2,
    bytes_sent=lambda wire: _bytes(wire) + wire.gathered(4),  # and the largest element
)

BF16 = CompressionKind(
    name="bf16", description="bfloat16", compress=_in("bfloat16"), element_bytes=2, bytes_sent=_bytes
)
