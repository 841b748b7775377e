"""What one rank may ask of all: to stop, or to save, after the same step.

Asks travel with the headers and losses of the steps, so that no rank waits for them. A step's asks are one number, the
sum over ranks of what each asks, in which the two kinds do not mix below a million ranks.
"""

from __future__ import annotations

__all__ = ["SAVE", "STOP", "asks_for_save", "asks_for_stop"]

STOP = 1
SAVE = 1 << 20


def asks_for_stop(asks: int) -> bool:
    """Whether some rank asks to stop."""
    return asks % SAVE > 0


def asks_for_save(asks: int) -> bool:
    """Whether some rank asks to save."""
    return asks >= SAVE
