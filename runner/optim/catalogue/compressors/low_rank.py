"""Matrices as products of thin factors."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from runner.config.schema import CompressionConfig
from runner.optim.catalogue.compression import CompressionKind, Wire

if TYPE_CHECKING:
    from runner.optim.compression.rounds import Compress

__all__ = ["GRAD_ZIP", "POWER_SGD"]

_WIDTH = 4  # bytes of an element of a message
Factors = Callable[[int, int, int], float]
"""From rank, rows and columns to the elements of the factors that are sent, or kept; not below rows * columns if the
matrix is sent whole."""


def _power(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.low_rank import power_sgd

    assert section.rank is not None
    return power_sgd(section.rank)


def _zip(section: CompressionConfig, feedback: bool) -> Compress:
    from runner.optim.compression.low_rank import grad_zip

    assert section.rank is not None
    return grad_zip(section.rank)


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Of the matrix that a tensor is; a vector has no columns to save."""
    return (shape[0], prod(shape[1:])) if len(shape) > 1 else (prod(shape), 1)


def _both(rank: int, rows: int, columns: int) -> float:
    thin = rank * (rows + columns) < rows * columns
    return rank * (rows + columns) if thin else rows * columns


def _one_of_two(rank: int, rows: int, columns: int) -> float:
    """The mean of two steps."""
    return rank * (rows + columns) / 2 if rank < min(rows, columns) else rows * columns


def _bytes(factors: Factors) -> Callable[[Wire], float]:
    def sent(wire: Wire) -> float:
        rank = wire.section.rank or 1
        return wire.summed(_WIDTH * sum(factors(rank, *_rows_and_columns(shape)) for shape in wire.shapes))

    return sent


def _kept_right(section: CompressionConfig, shape: tuple[int, ...]) -> int:
    (rows, columns), rank = _rows_and_columns(shape), section.rank or 1
    return _WIDTH * rank * columns if _both(rank, rows, columns) < rows * columns else 0


def _kept_both(section: CompressionConfig, shape: tuple[int, ...]) -> int:
    (rows, columns), rank = _rows_and_columns(shape), section.rank or 1
    return _WIDTH * rank * (rows + columns) if rank < min(rows, columns) else 0


POWER_SGD = CompressionKind(
    name="powersgd",
    description="matrices as two thin factors, by one power iteration",
    compress=_power,
    reads=("rank",),
    examples={"rank": (1, 2)},
    feeds_back=True,
    bytes_sent=_bytes(_both),
    state_bytes=_kept_right,
)

GRAD_ZIP = CompressionKind(
    name="gradzip",
    description="matrices as two thin factors, of which each step sends one",
    compress=_zip,
    reads=("rank",),
    examples={"rank": (1, 2)},
    feeds_back=True,
    bytes_sent=_bytes(_one_of_two),
    state_bytes=_kept_both,
)
