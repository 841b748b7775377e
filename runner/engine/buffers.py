"""Tensors that wait for their use; each has one owner, and is put once and taken once."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from runner.model.boundary import shapes

__all__ = ["Buffers"]


class Buffers:
    """Holds values by (kind, stage, micro-batch)."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], Any] = {}

    def put(self, kind: str, stage: int, microbatch: int, value: Any) -> None:
        """Store ``value``.

        Raises:
            RuntimeError: there is a value already.
        """
        key = kind, stage, microbatch
        if key in self._held:
            raise RuntimeError(f"the {kind} of stage {stage}, micro-batch {microbatch} is there already")
        self._held[key] = value

    def has(self, kind: str, stage: int, microbatch: int) -> bool:
        """Whether there is such a value."""
        return (kind, stage, microbatch) in self._held

    def peek(self, kind: str, stage: int, microbatch: int) -> Any:
        """Return a value and keep it.

        Raises:
            RuntimeError: there is no such value.
        """
        try:
            return self._held[kind, stage, microbatch]
        except KeyError:
            raise RuntimeError(f"the {kind} of stage {stage}, micro-batch {microbatch} is not there") from None

    def take(self, kind: str, stage: int, microbatch: int) -> Any:
        """Remove and return a value; otherwise like :meth:`peek`."""
        try:
            return self._held.pop((kind, stage, microbatch))
        except KeyError:
            return self.peek(kind, stage, microbatch)

    def clear(self) -> list[Any]:
        """Remove and return all values."""
        values = list(self._held.values())
        self._held.clear()
        return values

    def require_empty(self, numbers: Container[int] | None = None) -> None:
        """Raise a RuntimeError that names the values that are left, if there are any.

        Args:
            numbers: the micro-batches to check; default: all.
        """
        held = sorted(key for key in self._held if numbers is None or key[2] in numbers)
        if held:
            left = ", ".join(f"{kind} {stage}/{microbatch}" for kind, stage, microbatch in held)
            raise RuntimeError(f"buffers were left at the end of the window (stage/micro-batch): {left}")

    def describe(self, stage: int, microbatch: int | None) -> str:
        """The shapes of the values of a stage and micro-batch, for error messages."""
        parts = []
        for (kind, at, number), value in self._held.items():
            if at == stage and number == microbatch:
                parts.append(f"{kind}: {shapes(getattr(value, 'tensors', value))}")
        return "; ".join(parts) or "no buffers"
