"""The runs that are compared: batch sizes, and rules by which the learning rate follows them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["BATCHES", "RULES", "SAMPLES", "Cell", "cells"]

BATCHES = (24, 96, 384, 1536)
SAMPLES = 12_288
"""Samples of every run, so that a batch of B has 12,288 / B steps."""

_SMALLEST = BATCHES[0]
_MICROBATCH = 96  # samples that are computed at once, so that large batches need no more memory
_WARM_UP = 1 / 8  # of the steps


@dataclass(frozen=True, slots=True)
class Rule:
    """How the learning rate follows the batch size B.

    Args:
        optimizer: its overrides.
        rate: the rate of the smallest batch.
        power: the rate grows with this power of B.
        warms_up: whether it rises in a straight line over the first eighth of the steps; then it falls to zero.
    """

    optimizer: tuple[str, ...]
    rate: float
    power: float
    warms_up: bool

    def rate_of(self, batch: int) -> float:
        """The peak rate of a batch of this size."""
        return float(self.rate * (batch / _SMALLEST) ** self.power)


RULES = {
    "fixed rate": Rule(("optimizer=sgd", "optimizer.momentum=0.9"), 0.1, 0.0, warms_up=False),
    "linear scaling, warm-up": Rule(("optimizer=sgd", "optimizer.momentum=0.9"), 0.1, 1.0, warms_up=True),
    "LARS": Rule(("optimizer=lars", "optimizer.momentum=0.9"), 2.0, 0.5, warms_up=True),
    "LAMB": Rule(("optimizer=lamb",), 0.01, 0.5, warms_up=True),
}
"""Goyal et al. 2017 (linear scaling, gradual warm-up), You et al. 2017 (LARS), You et al. 2020 (LAMB, square root)."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Args:
        rule: one of :data:`RULES`.
        batch: samples of a step.
        samples: of the whole run.
    """

    rule: str
    batch: int
    samples: int = SAMPLES

    @property
    def steps(self) -> int:
        return self.samples // self.batch

    @property
    def rate(self) -> float:
        """The peak learning rate."""
        return RULES[self.rule].rate_of(self.batch)

    @property
    def folder(self) -> str:
        """The name of the run's directory."""
        return f"{self.rule.split(',')[0].replace(' ', '_').lower()}_{self.batch}"

    @property
    def overrides(self) -> list[str]:
        """What ``runner train`` is told."""
        rule = RULES[self.rule]
        warm_up = math.ceil(_WARM_UP * self.steps) if rule.warms_up else 0
        return [
            *("recipe=large_batch", *rule.optimizer, f"optimizer.lr={self.rate:g}"),
            *(f"data.batch_size={self.batch}", f"schedule.microbatches={math.ceil(self.batch / _MICROBATCH)}"),
            *(f"trainer.max_steps={self.steps}", f"trainer.val_every={self.steps}"),
            f"lr_scheduler.warmup_steps={warm_up}",
        ]


def cells(samples: int = SAMPLES) -> Iterator[Cell]:
    """All runs, batch by batch."""
    for batch in BATCHES:
        for rule in RULES:
            yield Cell(rule, batch, samples)
