"""Defines how a compressor of gradients describes itself. The description needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from runner.config.rules.table import Table
from runner.config.schema import CompressionConfig, RunConfig

if TYPE_CHECKING:
    from runner.engine.update.gradients import StageGradients
    from runner.engine.update.reducer import Reducer
    from runner.optim.compression.rounds import Compress

__all__ = ["CompressionKind", "Wire"]

_FP32 = 4


@dataclass(frozen=True, slots=True)
class Wire:
    """What the bytes that one replica sends in a step depend on.

    Args:
        section: the compressor's keys.
        shapes: the shapes of one stage's tensors.
        width: bytes of an element of the gradients.
        replicas: the number of replicas R.
    """

    section: CompressionConfig
    shapes: Sequence[tuple[int, ...]]
    width: int
    replicas: int

    @property
    def sizes(self) -> list[int]:
        """The elements of each tensor."""
        return [prod(shape) for shape in self.shapes]

    def summed(self, num_bytes: float) -> float:
        """Bytes sent in an all-reduce over a ring: 2 (R - 1) / R of the bytes."""
        return 2 * (self.replicas - 1) / self.replicas * num_bytes

    def gathered(self, num_bytes: float) -> float:
        """Bytes sent where every replica gets every other one's message: R - 1 times the message."""
        return (self.replicas - 1) * num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionKind:
    """One way to sum the gradients of a stage over its replicas; it has either ``make`` or ``compress``.

    Args:
        name: what ``compression=`` calls it.
        description: what it does, in one line.
        make: makes the reducer of one stage's gradients; it imports what it needs itself.
        compress: makes a compressor (:mod:`runner.optim.compression.rounds`) from the section and whether residuals are
            fed back; it imports what it needs itself. Residuals, plain first steps and checkpoints are there already.
        keys: the keys that ``compression.kwargs`` may hold, with their defaults; None: the arguments of a function.
        reads: the keys of the section that it needs besides those of every compressor.
        examples: some legal values of keys that it reads, and of its own; tests draw from them.
        element_bytes: bytes to which it narrows each element; gradients must be wider. None: it does something else.
        feeds_back: whether residuals are fed back if ``compression.error_feedback`` does not say it; only with
            ``compress``.
        bytes_sent: the bytes that one replica sends in a mean step; None: those of an all-reduce of whole gradients.
        state_bytes: takes the shape of a tensor, and returns the bytes that are kept of it besides the residual.
        rules: the rules of a request with this compressor, besides the rules of all compressors.
    """

    name: str
    description: str
    make: Callable[[CompressionConfig, StageGradients], Reducer] | None = field(default=None, repr=False)
    compress: Callable[[CompressionConfig, bool], Compress] | None = field(default=None, repr=False)
    keys: Mapping[str, Any] | None = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    examples: Mapping[str, Sequence[object]] = field(default_factory=dict)
    element_bytes: int | None = None
    feeds_back: bool = False
    bytes_sent: Callable[[Wire], float] | None = None
    state_bytes: Callable[[CompressionConfig, tuple[int, ...]], int] | None = None
    rules: tuple[Table[RunConfig], ...] = field(default=(), repr=False)

    def settings(self, section: CompressionConfig) -> dict[str, Any]:
        """The section's keys, with defaults for keys that it does not give."""
        return {**(self.keys or {}), **section.kwargs}

    def place_of(self, key: str) -> str:
        """Where a request gives a key, below ``compression.``: the compressor's own are in ``kwargs``."""
        return f"kwargs.{key}" if key in (self.keys or {}) else key

    def reducer(self, section: CompressionConfig, gradients: StageGradients) -> Reducer:
        """Make what sums the gradients of one stage.

        Raises:
            RequestError: a user's own function or kind does not make it.
        """
        if section.target is None:
            return self._made(section, gradients)
        from runner.engine.update.own_reducer import own_reducer

        return own_reducer(section.target, partial(self._made, section), gradients)

    def try_reducer(self, section: CompressionConfig) -> None:
        """Make the reducer of a user's own once, for small tensors.

        Raises:
            RequestError: the user's function or kind does not make it.
        """
        if section.target is not None:
            from runner.engine.update.own_reducer import try_reducer

            try_reducer(section.target, partial(self._made, section))

    def _made(self, section: CompressionConfig, gradients: StageGradients) -> Reducer:
        if self.compress is None:
            assert self.make is not None
            return self.make(section, gradients)
        from runner.engine.update.compressed import CompressedSum

        feedback = self.has_residuals(section)
        compress = self.compress(section, feedback)
        return CompressedSum(gradients, compress, feedback=feedback, start_step=section.start_step)

    def has_residuals(self, section: CompressionConfig) -> bool:
        """Whether each replica keeps what it has not sent, and adds it to its next gradients."""
        return self.compress is not None and (
            self.feeds_back if section.error_feedback is None else section.error_feedback
        )

    def bytes_in_a_step(self, wire: Wire) -> float:
        """Bytes that one replica sends in a step; see ``bytes_sent``."""
        if self.bytes_sent is not None:
            return self.bytes_sent(wire)
        return wire.summed(sum(wire.sizes) * wire.width)

    def kept_bytes(self, section: CompressionConfig, shape: tuple[int, ...]) -> int:
        """Bytes that one replica keeps of a tensor from step to step, as far as the kind says it."""
        residual = _FP32 * prod(shape) if self.has_residuals(section) else 0
        return residual + (self.state_bytes(section, shape) if self.state_bytes is not None else 0)
