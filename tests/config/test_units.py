"""Sizes and times as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.config.units import byte_unit, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("8GiB", 8 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 kib", 1536),
        ("1000", 1000),
        ("1e9", 10**9),
        (7, 7),
        (2.5e3, 2500),
        ("3 B", 3),
        ("2TiB", 2**41),
    ],
)
def test_sizes(text: str | int | float, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "8XB", "-1GB", "8 G B", "8GiBx", "nan", "8..5GB"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=10**16))
def test_a_number_of_bytes_is_itself(num_bytes: int) -> None:
    assert parse_bytes(str(num_bytes)) == num_bytes


@given(st.integers(min_value=1000, max_value=10**14))
def test_a_shown_size_is_near(num_bytes: int) -> None:
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=6e-3)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (1_501_000, "1.50 MB"),
        (12_340_000, "12.3 MB"),
        (123.4e9, "123 GB"),
    ],
)
def test_shown_sizes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000123, "12.3 us"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (119.0, "119 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
    ],
)
def test_shown_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_the_unit_fits_the_number() -> None:
    assert [byte_unit(size) for size in (0, 999, 11_000_000, 2e15)] == [("B", 1), ("B", 1), ("MB", 1e6), ("TB", 1e12)]
