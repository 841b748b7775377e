"""SLURM: the batch script of a run, its submission, and the ranks that srun starts."""

from __future__ import annotations

__all__: list[str] = []
