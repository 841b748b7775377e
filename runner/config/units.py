"""Sizes and times as people write them, and back."""

from __future__ import annotations

import re
from fractions import Fraction

__all__ = ["byte_unit", "format_bytes", "format_count", "format_rate", "format_seconds", "parse_bytes"]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)")


def parse_bytes(text: str | int | float) -> int:
    """Bytes of ``80GB`` (powers of 1000), ``8GiB`` (powers of 1024), or a plain number.

    Raises:
        ValueError: it is none of these.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size: write 80GB, 8GiB, 512MB or a number of bytes")
    return round(Fraction(match[1]) * _UNITS[match[2].lower()])


def format_bytes(num_bytes: float) -> str:
    """``1.50 GB``: three significant digits, powers of 1000."""
    unit, scale = byte_unit(num_bytes)
    size = num_bytes / scale
    if unit == "B":
        return f"{size:.0f} B"
    digits = 0 if abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {unit}"


def byte_unit(num_bytes: float) -> tuple[str, float]:
    """The unit in which people read so many bytes, and its bytes: ``("MB", 1e6)`` for 11 million."""
    scale = 1.0
    for unit in ("B", "kB", "MB", "GB"):
        if abs(num_bytes) / scale < 999.5:
            return unit, scale
        scale *= 1000
    return "TB", scale


def format_seconds(seconds: float) -> str:
    """``12.3 ms``, ``4.56 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if seconds >= 120:
        whole = round(seconds)
        return f"{whole // 60} min {whole % 60:02d} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_count(count: int) -> str:
    """``6.58 billion``, ``935 thousand`` or ``12``: three significant digits."""
    for scale, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= 0.9995 * scale:
            return f"{count / scale:#.3g}".rstrip(".") + f" {name}"
    return str(count)


def format_rate(per_second: float) -> str:
    """``18,700`` or ``4.2``: three significant digits, and no exponent."""
    if per_second >= 1000:
        return f"{float(f'{per_second:.3g}'):,.0f}"
    return f"{per_second:.3g}"
