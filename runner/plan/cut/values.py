"""Defines a partition, and limits for its stages."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Partition", "StageLimit"]

Partition = tuple[tuple[int, int], ...]  # first and last layer of each stage, both inclusive


class StageLimit(Protocol):
    """Decides which layers a stage may hold. Layers are first .. last, both inclusive."""

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether this stage may hold these layers."""

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether these layers do not fit, and not with more layers before ``first`` either: the search can stop."""
