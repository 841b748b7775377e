"""Hydra's plugins in a sweep: submitit's launcher, which submits its jobs as an array."""

from __future__ import annotations

__all__: list[str] = []
