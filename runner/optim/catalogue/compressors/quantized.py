"""Few bits per element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind, Wire

if TYPE_CHECKING:
    from runner.optim.compression.rounds import Compress

__all__ = ["QSGD", "SIGN_SGD"]


def _levels(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.quantized import qsgd

    assert section.levels is not None
    return qsgd(section.levels)


def _signs(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.quantized import sign_sgd

    return sign_sgd(vote=not feedback)


def _bytes(wire: Wire, bits: int) -> float:
    """A number for each tensor, and the bits of all elements, eight elements at a time."""
    return wire.gathered(4 * len(wire.shapes) + -(-sum(wire.sizes) // 8) * bits)


QSGD = CompressionKind(
    name="qsgd",
    description="elements rounded at random to levels of their tensor's norm",
    compress=_levels,
    reads=("levels",),
    examples={"levels": (7, 127)},
    bytes_sent=lambda wire: _bytes(wire, (2 * (wire.section.levels or 1)).bit_length()),
)

SIGN_SGD = CompressionKind(
    name="signsgd",
    description="signs, and the mean magnitude of each tensor",
    compress=_signs,
    feeds_back=True,
    bytes_sent=lambda wire: _bytes(wire, 1),
)
