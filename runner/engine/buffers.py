"""Tensors that wait for their use, each with one owner: put once, taken once."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from runner.model.boundary import shapes

__all__ = ["Buffers"]


class Buffers:
    """Values by (kind, stage, micro-batch)."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int, int], Any] = {}

    def put(self, kind: str, stage: int, microbatch: int, value: Any) -> None:
        """Hand ``value`` over.

        Raises:
            RuntimeError: the place is taken.
        """
        key = kind, stage, microbatch
        if key in self._held:
            raise RuntimeError(f"the {kind} of stage {stage}, micro-batch {microbatch} is there already")
        self._held[key] = value

    def has(self, kind: str, stage: int, microbatch: int) -> bool:
        """Whether a value is there."""
        return (kind, stage, microbatch) in self._held

    def peek(self, kind: str, stage: int, microbatch: int) -> Any:
        """Look at a value that stays.

        Raises:
            RuntimeError: it is not there.
        """
        try:
            return self._held[kind, stage, microbatch]
        except KeyError:
            raise RuntimeError(f"the {kind} of stage {stage}, micro-batch {microbatch} is not there") from None

    def take(self, kind: str, stage: int, microbatch: int) -> Any:
        """Take a value away; like :meth:`peek` otherwise."""
        try:
            return self._held.pop((kind, stage, microbatch))
        except KeyError:
            return self.peek(kind, stage, microbatch)

    def clear(self) -> list[Any]:
        """Take everything away."""
        values = list(self._held.values())
        self._held.clear()
        return values

    def require_empty(self, numbers: Container[int] | None = None) -> None:
        """Raise RuntimeError, naming what is left, unless nothing is.

        Args:
            numbers: of the micro-batches that are looked at; default: all.
        """
        held = sorted(key for key in self._held if numbers is None or key[2] in numbers)
        if held:
            left = ", ".join(f"{kind} {stage}/{microbatch}" for kind, stage, microbatch in held)
            raise RuntimeError(f"buffers were left at the end of the window (stage/micro-batch): {left}")

    def describe(self, stage: int, microbatch: int | None) -> str:
        """The shapes that a stage's micro-batch holds, for error messages."""
        parts = []
        for (kind, at, number), value in self._held.items():
            if at == stage and number == microbatch:
                parts.append(f"{kind}: {shapes(getattr(value, 'tensors', value))}")
        return "; ".join(parts) or "no buffers"
