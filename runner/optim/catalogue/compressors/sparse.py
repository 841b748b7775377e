"""A part of each tensor's elements."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind, Wire

if TYPE_CHECKING:
    from runner.optim.compression.rounds import Compress

__all__ = ["RANDOM_K", "TOP_K"]

_VALUE, _PLACE = 4, 4  # bytes of an element of a message


def _top(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.sparse import top_k

    assert section.density is not None
    return top_k(section.density)


def _random(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.sparse import random_k

    assert section.density is not None
    return random_k(section.density, unbiased=not feedback)


def _count(wire: Wire) -> int:
    assert wire.section.density is not None
    return sum(ceil(wire.section.density * size) for size in wire.sizes)


TOP_K = CompressionKind(
    name="topk",
    description="each replica's largest elements",
    compress=_top,
    reads=("density",),
    examples={"density": (0.25, 0.5)},
    feeds_back=True,
    bytes_sent=lambda wire: wire.gathered((_VALUE + _PLACE) * _count(wire)),
)

RANDOM_K = CompressionKind(
    name="randomk",
    description="random elements, the same of all replicas",
    compress=_random,
    reads=("density",),
    examples={"density": (0.25, 0.5)},
    feeds_back=True,
    bytes_sent=lambda wire: wire.summed(_VALUE * _count(wire)),
)
