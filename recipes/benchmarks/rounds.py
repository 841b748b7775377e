"""Contestants take turns within one run, so that whatever slows the machine down meets them all."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

__all__ = ["Seconds", "take_turns"]

Seconds = dict[str, list[float]]
"""Per contestant, seconds per step of each round."""


def take_turns(
    contestants: Mapping[str, Callable[[], object]],
    *,
    warm_rounds: int,
    rounds: int,
    steps: int,
    meet: Callable[[], object],
) -> Seconds:
    """Time ``steps`` steps of each contestant in turn, round after round.

    Args:
        contestants: one optimizer step of each, by name.
        warm_rounds: rounds before the first that counts.
        rounds: rounds that count.
        steps: steps of a contestant's turn.
        meet: waits for all ranks; called before and after each turn, so that a turn's time is that of all ranks.
    """
    seconds: Seconds = {name: [] for name in contestants}
    for number in range(warm_rounds + rounds):
        for name, step in contestants.items():
            meet()
            start = time.perf_counter()
            for _ in range(steps):
                step()
            meet()
            if number >= warm_rounds:
                seconds[name].append((time.perf_counter() - start) / steps)
    return seconds
