"""Defines how a compressor of gradients describes itself. The description needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.config.rules.table import Table
from runner.config.schema import CompressionConfig, RunConfig

if TYPE_CHECKING:
    from runner.engine.update.gradients import StageGradients
    from runner.engine.update.reducer import Reducer

__all__ = ["CompressionKind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionKind:
    """One way to sum the gradients of a stage over its replicas.

    Args:
        name: what ``compression=`` calls it.
        description: what it does, in one line.
        make: makes the reducer of one stage's gradients; it imports what it needs itself.
        keys: the keys that ``compression.kwargs`` may hold, with their defaults; None: the arguments of a function.
        bytes_sent: takes a number of elements, their width in bytes and the number of replicas, and returns the bytes
            that one replica sends in a step; None: those of an all-reduce of whole gradients, ``2 (R - 1) / R`` of
            their bytes.
        rules: the rules of a request with this compressor, besides the rules of all compressors.
    """

    name: str
    description: str
    make: Callable[[CompressionConfig, StageGradients], Reducer] = field(repr=False)
    keys: Mapping[str, Any] | None = field(default_factory=dict)
    bytes_sent: Callable[[int, int, int], float] | None = None
    rules: tuple[Table[RunConfig], ...] = field(default=(), repr=False)

    def settings(self, section: CompressionConfig) -> dict[str, Any]:
        """The section's keys, with defaults for keys that it does not give."""
        return {**(self.keys or {}), **section.kwargs}

    def bytes_in_a_step(self, elements: int, width: int, replicas: int) -> float:
        """Bytes that one replica sends in a step; see ``bytes_sent``."""
        if self.bytes_sent is not None:
            return self.bytes_sent(elements, width, replicas)
        return 2 * (replicas - 1) / replicas * elements * width
