"""Hydra's plugins in a sweep: submitit's launcher, which submits the jobs as one array, and Optuna's sweeper."""

from __future__ import annotations

__all__: list[str] = []
