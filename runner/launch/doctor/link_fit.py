"""The latency and the speed of a link, from the seconds of messages of several sizes.

A message of n bytes takes α + n / β. Sizes span six orders of magnitude, so that errors in proportion to the measured
seconds are made small: otherwise the largest size alone would count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from runner.config.units import format_bytes, format_seconds

__all__ = ["WITHIN", "LinkFit", "fit_link"]

_FEWEST = 4  # sizes of which some can be left out

WITHIN = 0.1
"""The share of the measured seconds within which a fit is said to hold."""


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A line through the seconds of messages.

    Args:
        latency_seconds: α, of one message.
        bytes_per_second: β.
        residual: root of the mean square of (fitted - measured) / measured.
        holds_from_bytes: the least measured size from which on all are within ``WITHIN``; None: not even the last.
        sizes: the number of sizes.
        left_out: median of abs(fitted - measured) / measured of every second size, by the line through the others;
            None: fewer than four sizes were measured.
    """

    latency_seconds: float
    bytes_per_second: float
    residual: float
    holds_from_bytes: int | None
    sizes: int
    left_out: float | None = None

    def to_json(self) -> dict[str, float | int | None]:
        """The fit as it stands in the file of measured links."""
        return asdict(self)

    def told(self) -> str:
        """The fit in words, with how far it is from what was measured."""
        line = f"{format_seconds(self.latency_seconds)} + n / {self.bytes_per_second / 1e9:.3g} GB/s"
        held = f"not within {WITHIN:.0%} even at the largest"
        if self.holds_from_bytes is not None:
            held = f"within {WITHIN:.0%} from {format_bytes(self.holds_from_bytes)} on"
        apart = f"; {self.left_out:.0%} off at sizes that are left out" if self.left_out is not None else ""
        return f"{line} ({self.residual:.0%} off, root mean square over {self.sizes} sizes, {held}{apart})"

    def as_override(self, name: str = "link") -> str:
        """The value of ``hardware.links`` that says the same of all ranks."""
        figures = f"latency_seconds: {self.latency_seconds:.3g}, bytes_per_second: {self.bytes_per_second:.4g}"
        return f"hardware.links=[{{name: {name}, ranks: all, {figures}}}]"


def fit_link(seconds: Sequence[tuple[int, float]], *, messages: int = 1, share: float = 1.0) -> LinkFit:
    """Fit latency and speed to measured seconds by least squares of relative errors; neither is negative.

    Args:
        seconds: sizes in bytes, ascending, each with its seconds.
        messages: how many messages wait for one another in what was measured; more than one in a ring's collective.
        share: bytes that each rank's link carries for each byte of the size.
    """
    constant, slope = _line(seconds)
    errors = _errors(seconds, constant, slope)
    holds = None
    for (size, _), error in reversed(list(zip(seconds, errors, strict=True))):
        if abs(error) > WITHIN:
            break
        holds = size
    residual = math.sqrt(sum(error * error for error in errors) / len(errors))
    apart = None
    if len(seconds) >= _FEWEST:
        left_out = seconds[1:-1:2]
        others = [each for each in seconds if each not in left_out]
        apart = median(map(abs, _errors(left_out, *_line(others))))
    return LinkFit(constant / messages, share / slope, residual, holds, len(seconds), apart)


def _errors(seconds: Sequence[tuple[int, float]], constant: float, slope: float) -> list[float]:
    """The relative error of a line at each size."""
    return [(constant + slope * size) / taken - 1 for size, taken in seconds]


def _line(seconds: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of no byte and of each byte, by least squares of relative errors."""
    largest = seconds[-1][0]
    rows = [(1 / taken, size / largest / taken) for size, taken in seconds]
    ones, sizes = sum(one for one, _ in rows), sum(size for _, size in rows)
    both = sum(one * size for one, size in rows)
    squares = sum(one * one for one, _ in rows), sum(size * size for _, size in rows)
    determinant = squares[0] * squares[1] - both * both
    constant, slope = 0.0, sizes / squares[1]  # a line through nothing, where noise makes one of the two negative
    if determinant > 0:
        free = (ones * squares[1] - sizes * both) / determinant, (sizes * squares[0] - ones * both) / determinant
        if free[0] >= 0 and free[1] > 0:
            constant, slope = free
    return constant, slope / largest
