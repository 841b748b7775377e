"""Starts the ranks of a run and keeps the promises that hold however the run ends."""

from __future__ import annotations

__all__: list[str] = []
