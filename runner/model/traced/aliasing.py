"""Operators whose schemas do not say that they may return their input."""

from __future__ import annotations

__all__ = ["ALIASING"]

ALIASING = ("dropout", "contiguous", "lift")
"""Parts of their names."""
