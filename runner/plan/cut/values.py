"""Defines a partition, and limits for its stages."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Partition", "RankLimit", "StageLimit"]

Partition = tuple[tuple[int, int], ...]  # first and last layer of each stage, both inclusive


class StageLimit(Protocol):
    """Decides which layers a stage may hold. Layers are first .. last, both inclusive."""

    def fits(self, first: int, last: int, stage: int) -> bool:
        """Whether this stage may hold these layers."""

    def hopeless(self, first: int, last: int, stage: int) -> bool:
        """Whether these layers do not fit, and not with more layers before ``first`` either: the search can stop."""


class RankLimit(Protocol):
    """Tells the memory of ranks with all of their stages."""

    def highest(self, layers: Partition) -> int:
        """The peak of the rank that needs most, in bytes."""

    def excess(self, layers: Partition) -> int:
        """The bytes by which ranks exceed their limit, summed over ranks."""
