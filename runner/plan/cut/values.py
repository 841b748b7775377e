"""What a partition is, and what may limit one."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Partition", "StageLimit"]

Partition = tuple[tuple[int, int], ...]  # per stage: first and last layer, both inclusive


class StageLimit(Protocol):
    """Which layers a stage may hold. Layers are first .. last, both inclusive."""

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether this stage may hold these layers."""

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether neither these layers nor these and more before ``first`` fit: lets the search stop early."""
